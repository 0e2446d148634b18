"""The memory of one `Mlp` on its GPUs, and its schedules that are ready to be called.

The kernel takes pointers of X and Y2 inside tensor maps in its parameter block, and the number of
tokens too. So a schedule for each number of tokens is kept, and for each the blocks of the
calls that were made last: a caller's allocator gives the same pointers again and again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ctatune.abi import ERROR, Argument
from ctatune.arguments import tokens_of
from ctatune.arrays import GpuArray, Place, View
from ctatune.errors import UsageError
from ctatune.gpus import Arena, Box
from ctatune.kernel import Kernel
from ctatune.launch import Operands, PlacedSchedule, Workspace
from ctatune.layout import pitch
from ctatune.limits import ALIGNMENT_BYTES
from ctatune.plans import Plan, Plans
from ctatune.problem import BF16_BYTES, Problem
from ctatune.ranks import Processes
from ctatune.schedule import Columns, build
from ctatune.shared import Bound, Listed, Shared

SCHEDULES = 256  # numbers of tokens that stay ready: flags, a list of tiles, perhaps ones, each
CALLS = 4096  # that stay ready: they differ in their places of X and Y2, or in their streams

# Whether it is captured, streams (of all GPUs with X on each), places of X, places of Y2. Unpack
# it for names: making a named tuple costs a call 0.4 us.
Key = tuple[bool, tuple[int, ...], tuple[Place, ...], tuple[Place, ...]]


class Ready(NamedTuple):
    """A schedule on the GPUs for one number of tokens."""

    placed: PlacedSchedule
    kernel: Kernel
    arena: Arena
    y: tuple[GpuArray, ...]  # Y2 on each GPU where the caller gives no room


class Call(NamedTuple):
    """What a call enqueues, and its Y2."""

    listed: Listed
    y: tuple[GpuArray, ...]
    m: int


class Placement:
    """The parts of whole weights on each GPU, a workspace for `problem.m` tokens, and schedules.

    `gpus` are the ordinals of the GPUs of this process, `ranks` the processes that take part. Use
    it inside `with shared`; `call` needs its lock alone.
    """

    def __init__(
        self, shared: Shared, gpus: range, ranks: Processes, problem: Problem, plans: Plans
    ) -> None:
        self._shared, self._problem, self._plans = shared, problem, plans
        self._gpus, self._ranks = gpus, ranks
        self._arena = Arena(shared.gpus)
        self._ready: OrderedDict[int, Ready] = OrderedDict()
        self._calls: OrderedDict[Key, Call] = OrderedDict()
        self._in_graphs: set[int] = set()  # tokens whose flags and tiles must stay

    def place(self, up: View, down: View) -> None:
        """Allocate everything that depends on no number of tokens but the most."""
        self._ranks.connect(self._shared.gpus)
        self._ranks.gather("placing weights", lambda: self._place_here(up, down))
        problem, plans = self._problem, self._plans
        y1_bytes = 2 * problem.m * plans.y1_width * BF16_BYTES
        reads = [plans.sums_over_gpus or own.width > 0 for own in plans.division[1]]
        self._workspace = Workspace(
            here=self._ranks.here,
            y1=self._ranks.memory("Y1", [y1_bytes * read for read in reads]),
            error=self._errors,
            zeros=self._ranks.zeros,
        )
        y2 = self._ranks.memory("Y2", [problem.m * problem.n * BF16_BYTES] * problem.gpus)
        self._own = replace(self._own, y2=y2)

    def _place_here(self, up: View, down: View) -> None:
        """What no other process uses."""
        self._shared.drain()  # whoever makes the weights is done
        k, here, arena = self._problem.k, list(enumerate(self._ranks.here)), self._arena
        x, w_up, w_down = ([0] * self._problem.gpus for _ in range(3))
        for i, gpu in here:
            w_up[gpu] = self._part(i, up, self._plans.division[0][gpu], Columns(0, k))
        for i, gpu in here:
            w_down[gpu] = self._part(i, down, *self._plans.w_down_held(gpu))
            x[gpu] = arena.zeros(i, self._problem.m * k * BF16_BYTES)
        self._own = Operands(x=tuple(x), w_up=tuple(w_up), w_down=tuple(w_down), y2=())
        self._errors = tuple(arena.zeros(i, ERROR.itemsize) for i, _ in here)

    def _part(self, gpu: int, whole: View, rows: Columns, columns: Columns) -> int:
        """Rows and columns of a weight, copied to `gpu` of this process; 0 when there are none."""
        bytes_of = (BF16_BYTES * n for n in (columns.width, whole.shape[1], pitch(columns.width)))
        box = Box(rows.width, *bytes_of)
        if not box.rows * box.row_bytes:
            return 0
        gpus = self._shared.gpus
        pointer = self._arena.alloc(gpu, box.rows * box.pitch)
        source = whole.pointer + rows.start * box.source_pitch + columns.start * BF16_BYTES
        gpus.copy_box(gpu, pointer, source, box, on_host=whole.gpu is None)
        gpus.wait(gpu)
        return pointer

    def own_x(self, m: int) -> Place:
        """X of m tokens in our own memory on the first GPU: zeros."""
        return self._own.x[self._ranks.here[0]], (m, self._problem.k), self._gpus[0]

    def call(self, key: Key) -> Call:
        """What a call enqueues: the same as the last time, or made ready now.

        Raises: UsageError when it cannot be made.
        """
        call = self._calls.get(key)
        if call is None:
            with self._shared:
                call = self._calls[key] = self._new(key)
            if len(self._calls) > CALLS:
                self._calls.popitem(last=False)
        else:
            self._calls.move_to_end(key)
        self._ready.move_to_end(call.m)
        return call

    def _new(self, key: Key) -> Call:
        captured, streams, x, y = key
        m = tokens_of(self._gpus, x, y, self._problem)
        ready = self._ready_for(m, captured)
        bound = self._bind(ready, m, [place[0] for place in x], [place[0] for place in y])
        listed = self._shared.listed(bound, streams, captured)
        return Call(listed, ready.y[: len(x)], m)

    def _ready_for(self, m: int, captured: bool) -> Ready:
        """The schedule of m tokens: kept, or built now; while captured it must be there."""
        ready = self._ready.get(m)
        if ready is None:
            if captured:
                raise UsageError(f"call warm_up({m}) before a capture: a schedule needs memory")
            self._evict()
            ready = self._ready[m] = self._build(m)
        if captured:
            self._in_graphs.add(m)
        return ready

    def _evict(self) -> None:
        """If there is no room, free an eighth: what is in no graph and was not used for longest."""
        idle = [m for m in self._ready if m not in self._in_graphs]
        if len(idle) >= SCHEDULES:
            gone = idle[: max(1, SCHEDULES // 8)]
            self._ranks.gather(f"freeing {gone}", self._shared.drain)
            for m in gone:
                self._ready.pop(m).arena.close()
            for key in [key for key, call in self._calls.items() if call.m not in self._ready]:
                del self._calls[key]

    def plan(self, m: int) -> Plan:
        """The plan for m tokens on which all processes agree."""
        return self._ranks.plan(m, self._plans.of)

    def _build(self, m: int) -> Ready:
        problem, config = replace(self._problem, m=m), self.plan(m).config
        self._ranks.same(f"CTAs for {m} tokens", lambda: self._shared.kernel(config).ctas)
        kernel, gpus = self._shared.kernel(config), self._shared.gpus
        schedule, arena = build(problem, config, self._plans.division), Arena(gpus)
        made: list[PlacedSchedule] = []

        def place() -> None:
            made.append(
                PlacedSchedule(
                    gpus, arena, schedule, [self._own], kernel=kernel, workspace=self._workspace
                )
            )

        try:
            self._ranks.gather(f"a schedule for {m} tokens", place)
        except BaseException:
            arena.close()
            raise
        (placed,) = made
        own = [self._own.y2[gpu] for gpu in self._ranks.here]
        y = (GpuArray(p, (m, problem.n), g, self) for p, g in zip(own, self._gpus, strict=True))
        return Ready(placed, kernel, arena, tuple(y))

    def _bind(self, ready: Ready, m: int, x: Sequence[int], y: Sequence[int]) -> Bound:
        """A call with X and Y2 at these places, on the first GPUs, and at our own on the others."""
        x_bytes = m * self._problem.k * BF16_BYTES
        y_bytes = m * self._problem.n * BF16_BYTES
        here = self._ranks.here
        at = list(self._own.x)
        for gpu, pointer in zip(here, x, strict=False):
            at[gpu] = pointer
        y2, copies = self._ranks.ends(tuple(y), self._own.y2, y_bytes)
        ends = [*y2, *(copy.to for copy in copies)]
        spans = sorted([(at[g], at[g] + x_bytes) for g in here] + [(p, p + y_bytes) for p in ends])
        if any(begin < end for (_, end), (begin, _) in pairwise(spans)):
            # A GPU may store Y2 while another one still reads X.
            raise UsageError("x and out must not overlap, nor may x be the y of the same Mlp")
        words = x_bytes // ALIGNMENT_BYTES
        pulls = [Argument(np.array([at[g], x[0], words], np.uint64)) for g in here]
        return Bound(ready.kernel, ready.placed.moved(at, y2), pulls, copies)

    def raise_poll_error(self) -> None:
        """Raise PipelineTimeoutError if a poll of any finished call ran out of time."""
        self._workspace.check(self._shared.gpus)

    def close(self) -> None:
        """Wait for everything on the GPUs, and free the memory."""
        self._ranks.leave(self._shared.drain)
        for ready in self._ready.values():
            ready.arena.close()
        self._ready.clear()
        self._calls.clear()
        self._arena.close()
