"""Runs a schedule tile by tile in NumPy, in a random order that its dependencies allow.

It is slow and obvious on purpose: what it computes is right, or the schedule is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctatune.errors import ScheduleError
from ctatune.schedule import DOWN, UP, Schedule

Matrix = NDArray[np.float32]
_SPEED_OCTAVES = 6.0  # the fastest CTA may run 64 times as fast as the slowest


def round_bf16(values: NDArray[np.floating]) -> Matrix:
    """Values rounded to the nearest bf16 (ties to even), as float32; NaN and infinity stay."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    bits = single.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(single), rounded.view(np.float32), single)


def linear(x: Matrix, weight: Matrix) -> Matrix:
    """`x @ weight.T`, summed in float64 and rounded once to float32."""
    return (x.astype(np.float64) @ weight.astype(np.float64).T).astype(np.float32)


def expected(x: Matrix, w_up: Matrix, w_down: Matrix) -> Matrix:
    """Y2 of the whole problem, float32; Y1 is rounded to bf16 as the kernel rounds it.

    Shapes: x is m x k, w_up is h x k, w_down is n x h, the result is m x n.
    """
    return linear(round_bf16(linear(x, w_up)), w_down)


def execute(
    schedule: Schedule,
    x: Matrix,
    w_up: Matrix,
    w_down: Matrix,
    *,
    ctas: int = 4,
    order_seed: int = 0,
    skip_wait: bool = False,
) -> list[Matrix]:
    """Y2 of every GPU after one call, float32, NaN where nothing is promised.

    A step of a CTA is one `up` tile, or one segment of a `down` tile: its partial sums stay with
    the CTA while it waits for the next segment. `order_seed` draws a speed for each CTA and the
    order of the steps. `skip_wait` is the negative control: `down` reads NaN where Y1 is missing.

    Shapes: as in `expected`; every Y2 is m x n.
    Raises: ScheduleError when all CTAs are blocked, an output is written twice, or a promised
    output is missing.
    """
    state = _State(schedule, (w_up, w_down), x, skip_wait)
    ctas_left = [
        _Cta(gpu=gpu, position=first, stride=ctas)
        for gpu, tiles in enumerate(schedule.tiles)
        for first in range(min(ctas, len(tiles)))
    ]
    rng = np.random.default_rng(order_seed)
    slowness = list(2.0 ** rng.uniform(0.0, _SPEED_OCTAVES, len(ctas_left)))
    while ctas_left:
        draws = rng.exponential(slowness)
        chosen = next((i for i in np.argsort(draws) if state.ready(ctas_left[i])), None)
        if chosen is None:
            raise ScheduleError(state.why_blocked(ctas_left))
        cta = ctas_left[chosen]
        state.step(cta)
        if cta.position >= len(schedule.tiles[cta.gpu]):
            del ctas_left[chosen], slowness[chosen]
    state.check_promises()
    return state.y[DOWN]


@dataclass(slots=True, kw_only=True)
class _Cta:
    gpu: int
    position: int  # of its tile in the GPU's list
    stride: int
    summed: int = 0  # segments that the partial sums of its `down` tile hold
    partial: Matrix | None = None

    def next_tile(self) -> None:
        self.position += self.stride
        self.summed, self.partial = 0, None


class _State:
    """Memory of all GPUs: weights cut as the schedule says, poisoned outputs, counters of Y1."""

    def __init__(
        self, schedule: Schedule, weights: tuple[Matrix, Matrix], x: Matrix, skip_wait: bool
    ) -> None:
        problem = schedule.problem
        self.schedule, self.x, self.skip_wait = schedule, x, skip_wait
        self.local_weights = [
            [weight[part.start : part.stop] for part in parts]
            for weight, parts in zip(weights, schedule.columns, strict=True)
        ]
        sizes = [(problem.m, layer.outputs) for layer in problem.layers]
        gpus = range(problem.gpus)
        self.y = [[np.full(size, np.nan, np.float32) for _ in gpus] for size in sizes]
        self.written = [[np.zeros(size, bool) for _ in gpus] for size in sizes]
        counters = (problem.gpus, schedule.panels, len(schedule.segments))
        self.arrived = np.zeros(counters, dtype=int)

    def ready(self, cta: _Cta) -> bool:
        return self.skip_wait or self._missing(cta) is None

    def _tile(self, cta: _Cta) -> list[int]:
        return self.schedule.tiles[cta.gpu][cta.position].tolist()

    def _segment(self, cta: _Cta) -> int:
        """The segment that the `down` tile of a CTA sums next."""
        return self.schedule.circle(self._tile(cta)[4])[cta.summed]

    def _missing(self, cta: _Cta) -> tuple[int, int] | None:
        """The first panel, and the segment in it, that the next step of a CTA waits for."""
        layer, row, *_ = self._tile(cta)
        if layer == UP:
            return None
        segment = self._segment(cta)
        target = self.schedule.segment_tiles[segment]
        for panel in self.schedule.panels_of(row):
            if self.arrived[cta.gpu, panel, segment] < target:
                return panel, segment
        return None

    def why_blocked(self, ctas: list[_Cta]) -> str:
        gpu, missing = ctas[0].gpu, self._missing(ctas[0])
        assert missing is not None
        panel, segment = missing
        return (
            f"all {len(ctas)} unfinished CTAs are blocked: GPU {gpu} waits for panel {panel}, "
            f"segment {segment}, target {self.schedule.segment_tiles[segment]}, "
            f"value {self.arrived[gpu, panel, segment]}"
        )

    def step(self, cta: _Cta) -> None:
        """Takes the next step of a CTA; a tile that it completes goes to every destination."""
        if self._tile(cta)[0] == UP:
            self._up(cta)
        else:
            self._down(cta)

    def _up(self, cta: _Cta) -> None:
        _, row, local, col, segment = self._tile(cta)
        tile = self.schedule.config.up
        weight = self.local_weights[UP][cta.gpu][local : local + tile.n]
        result = round_bf16(linear(self.x[row : row + tile.m], weight))
        for gpu in self.schedule.y1_gpus:
            self._store(UP, gpu, row, col, result)
            self.arrived[gpu, row // tile.m, segment] += 1
        cta.next_tile()

    def _down(self, cta: _Cta) -> None:
        """Adds one segment to the partial sums, in float32 and in the order of the schedule."""
        _, row, local, col, _ = self._tile(cta)
        tile, part = self.schedule.config.down, self.schedule.segments[self._segment(cta)]
        y1 = self.y[UP][cta.gpu][row : row + tile.m, part.start : part.stop]
        weight = self.local_weights[DOWN][cta.gpu][local : local + tile.n, part.start : part.stop]
        added = linear(y1, weight)
        cta.partial = added if cta.partial is None else cta.partial + added
        cta.summed += 1
        if cta.summed == len(self.schedule.segments):
            for gpu in self.schedule.y2_gpus[cta.gpu]:
                self._store(DOWN, gpu, row, col, cta.partial)
            cta.next_tile()

    def _store(self, layer: int, gpu: int, row: int, col: int, result: Matrix) -> None:
        area = (slice(row, row + result.shape[0]), slice(col, col + result.shape[1]))
        written = self.written[layer][gpu][area]
        if written.shape != result.shape or not result.size or written.any():
            what = "a second time" if written.any() else "outside the output"
            problem = self.schedule.problem
            raise ScheduleError(
                f"{problem.layers[layer].name} tile at row {row}, column {col} "
                f"is stored {what} on GPU {gpu}"
            )
        written[:] = True
        self.y[layer][gpu][area] = result

    def check_promises(self) -> None:
        """Raises: ScheduleError when an output that the problem promises was never written."""
        problem, columns = self.schedule.problem, self.schedule.columns[DOWN]
        for gpu, written in enumerate(self.written[DOWN]):
            promised = {
                "replicated": written,
                "sharded": written[:, columns[gpu].start : columns[gpu].stop],
                "last": written[:, : problem.n if gpu == problem.gpus - 1 else 0],
            }[problem.output]
            if not promised.all():
                missing = promised.size - np.count_nonzero(promised)
                raise ScheduleError(f"{missing} promised outputs were never stored on GPU {gpu}")
