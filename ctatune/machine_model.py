"""What latency model and simulator share: the rates of one machine, and the time of a tile."""

from __future__ import annotations

import json
import math
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from typing import Any

from ctatune.config import AnyConfig, Baseline, Tile
from ctatune.errors import UsageError
from ctatune.limits import TILE_K
from ctatune.problem import BF16_BYTES, Problem
from ctatune.records import Platform, Prediction
from ctatune.rooms import room

DEFAULT_PLATFORM = "nvidia-h200-nv18"
L2_SHARE = 0.5  # of L2 that one operand can count on while the other streams through
Z90 = 1.645  # two-sided 90 % of a normal distribution
# A burst of peer stores cost the next four tiles 19, 14, 6 and 2 us, as CTAs drift apart; stored at
# a pace that just fills the time of the burst, 3 and 1 us (4096x8192x8192, 2026-11-30).
_BURST_FADE = 0.55  # of the loss from one tile of a CTA to its next
_PACED_PART = 0.1  # of the loss that pacing leaves
_OUTSIDE = 3.0  # times the log error to expect where nothing near was measured
_MAY_BE_ZERO = {"burst_loss", "droop_fraction", "wave_softness", "flag_us", "launch_us", "tile_us"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The part of one layer that lies on one GPU: m x `inputs` times `columns` of its outputs.

    `tiles` counts the parts of a split tile as tiles: each is a CTA's work, with fewer `k_steps`.
    """

    m: int
    inputs: int
    columns: int
    tile: Tile
    ctas: int
    sharers: int = 1  # CTAs that load a weight tile together
    tiles_m: int = field(init=False)
    tiles_n: int = field(init=False)
    tiles: int = field(init=False)
    active: int = field(init=False)  # CTAs that work at the same time
    k_steps: int = field(init=False)

    def __post_init__(self) -> None:
        tiles_m, tiles_n = -(-self.m // self.tile.m), -(-self.columns // self.tile.n)
        tiles = tiles_m * tiles_n * self.tile.split_k
        object.__setattr__(self, "tiles_m", tiles_m)
        object.__setattr__(self, "tiles_n", tiles_n)
        object.__setattr__(self, "tiles", tiles)
        object.__setattr__(self, "active", min(self.ctas, tiles))
        k_blocks = -(-self.inputs // TILE_K)
        object.__setattr__(self, "k_steps", -(-k_blocks // self.tile.split_k))

    @property
    def tile_bytes(self) -> float:
        """Mean bytes of an output tile; rows and columns that do not exist are not stored."""
        return self.m * self.columns * BF16_BYTES / max(1, self.tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineModel:
    """Rates and fixed costs of one platform; where each comes from stands in its JSON file.

    Units: as each name ends; `*_tflops`, `l2_gbps`, `hbm_gbps` and `local_store_gbps` are of a
    whole GPU, `sm_port_gbps`, `smem_gbps` and `epilogue_gbps` of one SM, `link_gbps` of one
    direction of one GPU's link.
    """

    platform: Platform
    peak_tflops: float
    peak_hbm_gbps: float
    tensor_tflops: float
    cublas_tflops: float
    l2_gbps: float
    sm_port_gbps: float
    smem_gbps: float
    hbm_gbps: float
    link_gbps: float
    local_store_gbps: float
    flag_us: float
    launch_us: float
    cublas_launch_us: float
    burst_loss: float
    multicast_part: float
    tile_us: float
    epilogue_gbps: float
    droop_fraction: float
    droop_us: float
    wave_softness: float
    overlap_power: float
    nccl_us: float
    nccl_gbps: float
    two_shot_us: float
    two_shot_gbps: float
    estimate_log_sigma: float
    simulator_log_sigma: float
    offsets: tuple[tuple[str, float], ...] = ()  # log of what a family takes more than modelled
    ranges: tuple[tuple[str, int, int], ...] = ()  # sizes of a problem that were measured

    def __post_init__(self) -> None:
        for item in rates():
            value = getattr(self, item.name)
            allowed = value > 0 or (item.name in _MAY_BE_ZERO and value == 0)
            if not (allowed and math.isfinite(value)):
                raise UsageError(f"{item.name} of a machine model must be positive, got {value}")
        for name, peak in (("tensor_tflops", "peak_tflops"), ("hbm_gbps", "peak_hbm_gbps")):
            if getattr(self, name) > getattr(self, peak):
                raise UsageError(f"{name} must not exceed {peak}, got {getattr(self, name)}")

    def for_gpus(self, gpus: int) -> MachineModel:
        """The same machine with at least `gpus` GPUs, all linked as those that were measured."""
        if gpus <= self.platform.gpus:
            return self
        return replace(self, platform=replace(self.platform, gpus=gpus))

    def factor(self, config: AnyConfig) -> float:
        """What a config takes, to what rates alone would make of it: the offset of its family."""
        return math.exp(dict(self.offsets).get(family(config), 0.0))

    def covers(self, problem: Problem) -> bool:
        """Whether the sizes of a problem lie between those that were measured."""
        return all(low <= getattr(problem, name) <= high for name, low, high in self.ranges)

    def doubt(self, problem: Problem, log_sigma: float) -> float:
        """The log error to expect: more outside of what was measured."""
        return log_sigma * (1.0 if self.covers(problem) else _OUTSIDE)

    def clock(self, busy_us: float) -> float:
        """Part of the full clock that is left in a call with so much tensor time."""
        return 1.0 - self.droop_fraction * (1.0 - math.exp(-busy_us / self.droop_us))

    def link_us(self, size_bytes: float) -> float:
        """Time that a transfer occupies one direction of one GPU's link."""
        return size_bytes / self.link_gbps * 1e-3

    def burst_loss_us(self, work: Work, peers: int, pace_us: float, tile_us: float) -> float:
        """What the first burst of stores to peers takes from the sender's next tile.

        All CTAs end a tile together; while their stores saturate the link, loads are held up.
        """
        burst_us = min(work.active * self.link_us(work.tile_bytes * peers), tile_us)
        if not burst_us:
            return 0.0
        unpaced = max(_PACED_PART, 1.0 - pace_us * (work.tile.n // TILE_K) / burst_us)
        return self.burst_loss * burst_us * unpaced

    def local_store_us(self, size_bytes: float) -> float:
        """Time in which one SM stores to its own GPU's memory."""
        return size_bytes / self.local_store_gbps * self.platform.sm_count * 1e-3

    def both_us(self, compute_us: float, memory_us: float) -> float:
        """Compute and memory time that overlap, but not perfectly: their p-norm."""
        longer, shorter = max(compute_us, memory_us), min(compute_us, memory_us)
        if not longer:
            return 0.0
        return longer * (1.0 + (shorter / longer) ** self.overlap_power) ** (1 / self.overlap_power)

    def tensor_us(self, work: Work) -> float:
        """Tensor time of one tile at full clock."""
        flops = 2.0 * work.tile.m * work.tile.n * TILE_K * work.k_steps
        return flops / self.tensor_tflops * self.platform.sm_count * 1e-6

    def busy_us(self, layers: tuple[Work, ...]) -> float:
        """Tensor time of one GPU in a call, averaged over its CTAs: what heats it."""
        return sum(self.tensor_us(work) * work.tiles / work.ctas for work in layers)

    def epilogue_us(self, tile: Tile) -> float:
        return tile.m * tile.n * BF16_BYTES / self.epilogue_gbps * 1e-3

    def tile_time_us(self, work: Work, clock: float = 1.0) -> float:
        """Time from the start of a tile in a CTA to its result in shared memory.

        The main loop is bound by the tensor cores, by shared memory or by the operands through L2,
        and overlaps with the HBM traffic of all CTAs of the same wave.
        """
        if not work.tiles:
            return 0.0
        row_bytes = TILE_K * BF16_BYTES * work.k_steps
        loaded_bytes = (min(work.tile.m, work.m) + work.tile.n) * row_bytes
        read_bytes = (min(work.tile.m, work.m) + work.tile.n / work.sharers) * row_bytes
        l2_us = read_bytes / (self.l2_gbps / work.active) * 1e-3
        operands_us = max(loaded_bytes / self.sm_port_gbps * 1e-3, l2_us)
        smem_us = (loaded_bytes + wgmma_rows(work.tile) * row_bytes) / self.smem_gbps * 1e-3
        tensor_us = self.tensor_us(work) * (self.multicast_part if work.sharers > 1 else 1.0)
        main_us = max(tensor_us / clock, smem_us / clock, operands_us)
        wave_us = self.hbm_bytes(work) * work.active / work.tiles / self.hbm_gbps * 1e-3
        return self.both_us(main_us, wave_us) + self.tile_us + self.epilogue_us(work.tile) / clock

    def hbm_bytes(self, work: Work) -> float:
        """Operand bytes that the part of a layer reads from HBM, given the raster's reuse in L2.

        A wave covers `rows` tile rows. Weights that do not stay in L2 are read again for each
        `rows`, inputs that do not stay are read again for each wave across the columns.
        """
        row_bytes = work.inputs * BF16_BYTES
        cache_bytes = L2_SHARE * self.platform.l2_bytes
        together = work.active / work.tile.split_k
        rows = min(work.tiles_m, max(work.tile.group_m, together / work.tiles_n))
        fits = work.columns * row_bytes <= cache_bytes
        weight_passes = 1.0 if fits else work.tiles_m / rows
        fits = rows * work.tile.m * row_bytes <= cache_bytes
        input_passes = 1.0 if fits else max(1.0, work.tiles_n * rows / together)
        return row_bytes * (work.m * input_passes + work.columns * weight_passes)


def faded(first: int, count: float = 1) -> float:
    """Sum of the parts of the first burst's loss that `count` bursts of a CTA from `first` cost."""
    return _BURST_FADE**first * (1.0 - _BURST_FADE ** max(0.0, count)) / (1.0 - _BURST_FADE)


def pace_delay_us(tile: Tile, pace_us: float, turn: float) -> float:
    """How late the last slab of a paced tile leaves; `turn` in [0, 1) is the CTA's among all."""
    return pace_us * (tile.n // TILE_K - 1 + turn)


def wgmma_rows(tile: Tile) -> int:
    """Operand rows that one K-step reads from shared memory: each 64-row WGMMA reads its own A and
    all of B that its math group works on.
    """
    groups_n = min(2, tile.n // 64) if tile.m <= 64 else 1
    return -(-tile.m // 64) * (groups_n * 64 + tile.n)


def load(name: str | None = None) -> MachineModel:
    """The model of a platform (None: the default one). Raises: UsageError as `document` does."""
    return _model(DEFAULT_PLATFORM if name is None else name)


@cache
def _model(name: str) -> MachineModel:
    found = document(name)
    try:
        return model_of(found)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"the model of {name} is damaged: {error}") from error


def document(name: str) -> dict[str, Any]:
    """The file of a platform's model, as it stands in `models/`.

    Raises: UsageError when there is none; it names those that are.
    """
    known = ", ".join(_documents())
    if name not in _documents():
        raise UsageError(f"there is no model of platform {name!r}, only of {known}")
    return _documents()[name]


@cache
def _documents() -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted(room("models").glob("*.json")):
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            found[str(read["platform"]["name"])] = read
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{path} is not a machine model: {error}") from error
    return found


def model_of(document: dict[str, Any]) -> MachineModel:
    """The model that a file of `models/` describes.

    Raises: ValueError, TypeError, KeyError or AttributeError when it describes none.
    """
    values = {key: float(entry["value"]) for key, entry in document["parameters"].items()}
    return MachineModel(
        platform=Platform(**document["platform"]),
        offsets=tuple((name, float(log)) for name, log in document["offsets"].items()),
        ranges=tuple(
            (name, int(low), int(high)) for name, (low, high) in document["ranges"].items()
        ),
        **values,
    )


def family(config: AnyConfig) -> str:
    """What shares an offset: the tiles and how operands come and results go; a method."""
    if isinstance(config, Baseline):
        return config.method
    kind = " multicast" * config.multicast + " direct" * config.direct
    down = "" if config.down.n == config.up.n else f"+{config.down.n}"
    return f"{config.up.m}x{config.up.n}{down}/k{config.up.split_k}{kind}"


def rates() -> tuple[Field[Any], ...]:
    """The fields of a machine model that are numbers of the machine."""
    return tuple(item for item in fields(MachineModel) if item.type == "float")


def prediction(latency_us: float, log_sigma: float, model: str) -> Prediction:
    """A prediction with the 90 % interval of a log-normal error."""
    factor = math.exp(Z90 * log_sigma)
    interval_us = (latency_us / factor, latency_us * factor)
    return Prediction(latency_us=latency_us, interval_us=interval_us, model=model)
