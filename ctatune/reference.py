"""Runs a schedule tile by tile in NumPy, in a random order that its dependencies allow.

It is slow and obvious on purpose: what it computes is right, or the schedule is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctatune.errors import ScheduleError
from ctatune.limits import TILE_K, out_rows
from ctatune.schedule import DOWN, NOTHING, PARTIAL, UP, Columns, Schedule

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


def part_of(columns: Columns, part: int, parts: int) -> Columns:
    """What one of `parts` CTAs sums of a range of K: whole blocks of TILE_K, as even as can be."""
    blocks = -(-columns.width // TILE_K)
    start, stop = (columns.start + blocks * p // parts * TILE_K for p in (part, part + 1))
    return Columns(min(start, columns.stop), min(stop, columns.stop))


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

    A step of a CTA is the sum of its part of an `up` tile, or of one segment of a `down` tile
    (partial sums stay with the CTA while it waits for the next segment), or the store of the rows
    that it owns, once all parts of the tile are summed. `ctas`, made whole clusters, run on a GPU;
    `order_seed` draws a speed for each and the order of the steps. `skip_wait` is the negative
    control: `down` reads NaN where Y1 is missing.

    Shapes: as in `expected`; every Y2 is m x n.
    Raises: ScheduleError when all CTAs are blocked, an output is written twice, or a promised
    output is missing.
    """
    state = _State(schedule, (w_up, w_down), x, skip_wait)
    ctas += -ctas % schedule.config.cluster
    ctas_left = [
        _Cta(gpu=gpu, position=first, stride=ctas)
        for gpu, slots in enumerate(state.slots)
        for first in range(min(ctas, len(slots)))
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
        if cta.position >= len(state.slots[cta.gpu]):
            del ctas_left[chosen], slowness[chosen]
    state.check_promises()
    return state.y[DOWN]


@dataclass(slots=True, kw_only=True)
class _Cta:
    gpu: int
    position: int  # of its slot in the GPU's list
    stride: int
    summed: int = 0  # segments that the partial sums of its tile hold
    partial: Matrix | None = None

    def next_slot(self) -> None:
        self.position += self.stride
        self.summed, self.partial = 0, None


def _cut(weight: Matrix, rows: Columns, columns: Columns) -> Matrix:
    return weight[rows.start : rows.stop, columns.start : columns.stop]


class _State:
    """Memory of all GPUs: weights cut as the schedule says, poisoned outputs, counters of Y1."""

    def __init__(
        self, schedule: Schedule, weights: tuple[Matrix, Matrix], x: Matrix, skip_wait: bool
    ) -> None:
        problem = schedule.problem
        self.schedule, self.x, self.skip_wait = schedule, x, skip_wait
        gpus = range(problem.gpus)
        self.local_weights = [
            [weights[UP][own.start : own.stop] for own in schedule.columns[UP]],
            [_cut(weights[DOWN], *schedule.w_down_held(gpu)) for gpu in gpus],
        ]
        sizes = [(problem.m, schedule.y1_width), (problem.m, problem.n)]
        self.y = [[np.full(size, np.nan, np.float32) for _ in gpus] for size in sizes]
        self.written = [[np.zeros(size, bool) for _ in gpus] for size in sizes]
        self.slots = [schedule.slots(gpu).tolist() for gpu in gpus]
        self.parts: dict[tuple[int, int], dict[int, Matrix]] = {}  # of (GPU, first slot of a tile)
        self.targets = [schedule.arrivals(gpu) for gpu in gpus]
        self.arrived = np.zeros((problem.gpus, schedule.panels, len(self.targets[0])), dtype=int)

    def ready(self, cta: _Cta) -> bool:
        layer, *_, part = self._slot(cta)
        if layer == NOTHING:
            return True
        if cta.summed == self._sums(layer):
            parts = self.schedule.tile_of(layer).split_k
            return len(self.parts[cta.gpu, cta.position - part]) == parts
        return self.skip_wait or self._missing(cta) is None

    def _slot(self, cta: _Cta) -> list[int]:
        return self.slots[cta.gpu][cta.position]

    def _sums(self, layer: int) -> int:
        """Steps that sum a tile: K of `up` in one, that of `down` a segment a step."""
        return len(self.schedule.segments) if layer == DOWN else 1

    def _counter(self, cta: _Cta) -> int:
        """The counter of a panel that the next step of a `down` tile or partial sum waits for."""
        layer, *_, segment, _ = self._slot(cta)
        return self.schedule.awaits(layer, segment)[cta.summed]

    def _missing(self, cta: _Cta) -> tuple[int, int] | None:
        """The first panel, and the counter of it, that the next step of a CTA waits for."""
        layer, row, *_ = self._slot(cta)
        if layer not in (DOWN, PARTIAL) or cta.summed == self._sums(layer):
            return None
        counter = self._counter(cta)
        for panel in self.schedule.panels_of(row):
            if self.arrived[cta.gpu, panel, counter] < self.targets[cta.gpu][counter]:
                return panel, counter
        return None

    def why_blocked(self, ctas: list[_Cta]) -> str:
        blocked = f"all {len(ctas)} unfinished CTAs are blocked"
        found = ((cta.gpu, missing) for cta in ctas if (missing := self._missing(cta)))
        gpu, (panel, counter) = next(found, (0, (-1, -1)))
        if panel < 0:
            return f"{blocked}: each waits for other parts of its tile"
        return (
            f"{blocked}: GPU {gpu} waits for panel {panel}, "
            f"segment {counter}, target {self.targets[gpu][counter]}, "
            f"value {self.arrived[gpu, panel, counter]}"
        )

    def step(self, cta: _Cta) -> None:
        """Takes the next step of a CTA; rows that it completes go to every destination."""
        layer = self._slot(cta)[0]
        if layer == NOTHING:
            cta.next_slot()
        elif cta.summed < self._sums(layer):
            self._sum(cta, layer)
        else:
            self._finish(cta, layer)

    def _sum(self, cta: _Cta, layer: int) -> None:
        """Adds one segment to the partial sums, in float32 and in the order of the schedule."""
        _, row, local, col, _, part = self._slot(cta)
        schedule, tile = self.schedule, self.schedule.tile_of(layer)
        if layer == UP:
            a, weights = self.x, self.local_weights[UP][cta.gpu][local : local + tile.n]
            inputs, held = Columns(0, schedule.problem.k), Columns(0, schedule.problem.k)
        elif (over := self._counter(cta) - len(schedule.segments)) >= 0:  # another GPU summed it
            first = schedule.partial_column(cta.gpu) + over * schedule.partial_width
            rest = min(tile.n, schedule.problem.n - col)
            a, weights = self.y[UP][cta.gpu], np.eye(rest, dtype=np.float32)
            inputs = held = Columns(first + col, first + col + rest)
        else:
            a, held = self.y[UP][cta.gpu], schedule.w_down_held(cta.gpu)[1]
            inputs = schedule.segments[self._counter(cta)]
            weights = self.local_weights[DOWN][cta.gpu][local : local + tile.n]
        own = part_of(inputs, part, tile.split_k)
        weight = weights[:, own.start - held.start : own.stop - held.start]
        added = linear(a[row : row + tile.m, own.start : own.stop], weight)
        cta.partial = added if cta.partial is None else cta.partial + added
        cta.summed += 1
        if cta.summed == self._sums(layer):
            self.parts.setdefault((cta.gpu, cta.position - part), {})[part] = cta.partial

    def _finish(self, cta: _Cta, layer: int) -> None:
        """Adds the other parts to the CTA's own, in their order, and stores the rows it owns."""
        _, row, _, col, segment, part = self._slot(cta)
        schedule = self.schedule
        tile, parts = schedule.tile_of(layer), self.parts[cta.gpu, cta.position - part]
        first = part * out_rows(tile)
        own = slice(first, first + out_rows(tile))
        result = parts[part][own]
        for other in range(tile.split_k):
            if other != part:
                result = result + parts[other][own]
        receivers, counter = schedule.delivers(cta.gpu, layer, col, segment)
        if layer == PARTIAL:
            (owner,) = receivers
            col += schedule.partial_column(owner) + segment * schedule.partial_width
        if counter is not None:
            result = round_bf16(result)
        for gpu in receivers:
            if result.size or not part:  # the last rows of a ragged tile may be another part's
                self._store(DOWN if counter is None else UP, gpu, row + first, col, result)
            if counter is not None:
                self.arrived[gpu, row // tile.m, counter] += 1
        cta.next_slot()

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
        for gpu, columns in self.schedule.promised():
            written = self.written[DOWN][gpu][:, columns.start : columns.stop]
            if missing := np.count_nonzero(~written):
                raise ScheduleError(f"{missing} promised outputs were never stored on GPU {gpu}")
