"""What one GPU has to do of one layer: its tiles, and the bytes that they move at each level."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ctatune.config import Tile
from ctatune.layout import L2_LINE_BYTES
from ctatune.limits import TILE_K
from ctatune.problem import BF16_BYTES


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """The part of one layer that lies on one GPU: m x `inputs` times `columns` of its outputs.

    `tiles` counts the parts of a split tile as tiles: each is a CTA's work, with fewer `k_steps`.
    Nothing here depends on a rate, so that a fit computes it once. `columns` may be 0; then only
    `tiles` may be asked for.
    """

    m: int
    inputs: int
    columns: int
    tile: Tile
    ctas: int
    sharers: int = 1  # CTAs that load a weight tile together
    stages: int = 2
    dense: bool = False  # the rows of the inputs lie one behind the other: X
    kept_bytes: float = math.inf  # what L2 keeps for an operand while the other streams through

    @cached_property
    def tiles_m(self) -> int:
        return -(-self.m // self.tile.m)

    @cached_property
    def tiles_n(self) -> int:
        return -(-self.columns // self.tile.n)

    @cached_property
    def tiles(self) -> int:
        return self.tiles_m * self.tiles_n * self.tile.split_k

    @cached_property
    def active(self) -> int:
        """CTAs that work at the same time."""
        return min(self.ctas, self.tiles)

    @cached_property
    def k_steps(self) -> int:
        return -(-self.inputs // (TILE_K * self.tile.split_k))

    @cached_property
    def flops(self) -> float:
        return 2.0 * self.m * self.inputs * self.columns

    @cached_property
    def tile_bytes(self) -> float:
        """Mean bytes of an output tile; rows and columns that do not exist are not stored."""
        return self.m * self.columns * BF16_BYTES / max(1, self.tiles)

    @cached_property
    def row_bytes(self) -> int:
        """Of one row of an operand, as far as one tile sums over it."""
        return self.k_steps * TILE_K * BF16_BYTES

    @cached_property
    def lines(self) -> float:
        """Cache lines that 128 bytes of an input row touch: two, unless rows begin with lines."""
        if not self.dense:
            return 1.0
        return 2.0 - math.gcd(self.inputs * BF16_BYTES, L2_LINE_BYTES) / L2_LINE_BYTES

    @cached_property
    def input_rows(self) -> int:
        """Rows of the inputs that one whole tile loads; those of the last tile row, which may load
        fewer, wait for the others."""
        return min(self.tile.m, self.m)

    @cached_property
    def loaded_bytes(self) -> int:
        """What one whole tile loads into its SM."""
        return (self.input_rows + self.tile.n) * self.row_bytes

    @cached_property
    def ahead_bytes(self) -> int:
        """Weights that the ring holds before the inputs of a tile are there."""
        steps = min(self.stages - 1, self.k_steps)
        return steps * self.tile.n * TILE_K * BF16_BYTES

    @cached_property
    def wave(self) -> tuple[float, float]:
        """Tile rows and tile columns that the CTAs work at together: the shape of a wave."""
        together = self.active / self.tile.split_k
        rows = min(self.tiles_m, max(self.tile.group_m, together / self.tiles_n))
        return rows, max(1.0, together / rows)

    @cached_property
    def readers(self) -> tuple[float, float]:
        """CTAs that load the same inputs, and the same weights, in a wave."""
        rows, columns = self.wave
        return columns, max(1.0, rows / self.sharers)

    @cached_property
    def wave_bytes(self) -> float:
        """Different operand bytes of a wave."""
        rows, columns = self.wave
        return (rows * self.tile.m + columns * self.tile.n) * self.inputs * BF16_BYTES

    @cached_property
    def hbm_bytes(self) -> tuple[float, float]:
        """Operand bytes that HBM delivers when CTAs keep step, and those that it delivers again
        when they do not.

        Weights that do not stay in L2 are read again for each wave down the rows, inputs that do
        not stay for each wave across the columns. CTAs of a wave that read the same bytes at
        different times read them again, unless these stay anyway.
        """
        rows, columns = self.wave
        weights, inputs = (n * self.inputs * BF16_BYTES for n in (self.columns, self.m))
        inputs_stay = rows * self.tile.m * self.inputs * BF16_BYTES <= self.kept_bytes
        if weights > self.kept_bytes:
            weights *= self.tiles_m / rows
        if not inputs_stay:
            inputs *= max(1.0, self.tiles_n / columns)
        of_inputs, of_weights = self.readers
        again = weights * (of_weights - 1.0) + (0.0 if inputs_stay else inputs * (of_inputs - 1.0))
        return weights + inputs, again


class Memory(NamedTuple):
    """Times in which the operands of a tile come: through the SM's port, and what one more CTA
    takes of L2 and of HBM; the latter also has a latency that few CTAs cannot hide.
    """

    port_us: float
    l2_us: float
    hbm_us: float
    hbm_half_ctas: float  # that would be needed to hide it

    def us(self, active: float) -> float:
        """With so many CTAs at work."""
        return max(self.port_us, self.l2_us * active, self.hbm_us * (active + self.hbm_half_ctas))


class TileTime(NamedTuple):
    """What bounds a tile in a CTA, and what follows its main loop."""

    least_us: float  # for its instructions, or the latency of its loads
    memory: Memory
    memory_ahead: Memory  # of a tile whose first weights were loaded ahead
    between_us: float  # from one main loop to the next

    def us(self, active: float) -> float:
        """Time from the start of a tile to its result in shared memory, `active` CTAs at work."""
        return self._bound_us(self.memory, active) + self.between_us

    def ahead_us(self, active: float) -> float:
        """What it saves a tile that waits to have loaded weights."""
        return self._bound_us(self.memory, active) - self._bound_us(self.memory_ahead, active)

    def _bound_us(self, memory: Memory, active: float) -> float:
        return max(self.least_us, memory.us(active))
