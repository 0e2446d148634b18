"""The memory of one `Mlp` on its GPUs, and its schedules that are ready to be called.

The kernel takes pointers of X and Y2 inside tensor maps in its parameter block, and the number of
tokens too. So a schedule for each number of tokens is kept, and for each the blocks of the
pointers that were used last: a caller's allocator gives the same ones again and again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ctatune import abi, launch
from ctatune.abi import ERROR, Argument
from ctatune.arrays import GpuArray, View
from ctatune.errors import UsageError
from ctatune.gpus import Arena
from ctatune.kernel import Kernel
from ctatune.launch import Operands, Workspace
from ctatune.limits import ALIGNMENT_BYTES
from ctatune.plans import Plans
from ctatune.problem import BF16_BYTES, Problem
from ctatune.schedule import Columns, build
from ctatune.shared import Bound, Shared

SCHEDULES = 256  # numbers of tokens that stay ready: flags and a list of tiles each
POINTERS = 16  # places of X and Y2 that stay ready, for each number of tokens


class Ready(NamedTuple):
    """A schedule on the GPUs for one number of tokens, and its calls by their pointers."""

    m: int
    placed: launch.Mlp
    kernel: Kernel
    arena: Arena
    bound: OrderedDict[tuple[int, ...], Bound]
    y: tuple[GpuArray, ...]  # Y2 on each GPU where the caller gives no room


class Placement:
    """The parts of whole weights on each GPU, a workspace for `problem.m` tokens, and schedules.

    Use it inside `with shared`.
    """

    def __init__(self, shared: Shared, problem: Problem, plans: Plans) -> None:
        self._shared, self._problem, self._plans = shared, problem, plans
        self._arena = Arena(shared.gpus)
        self._ready: OrderedDict[int, Ready] = OrderedDict()
        self._in_graphs: set[int] = set()  # tokens whose flags and tiles must stay

    def place(self, up: View, down: View) -> None:
        """Allocate everything that depends on no number of tokens but the most."""
        m, k, n = (getattr(self._problem, name) for name in "mkn")
        everyone, arena = range(self._problem.gpus), self._arena
        ups, downs = self._plans.division
        self._shared.drain()  # whoever makes the weights is done
        w_up = tuple(self._part(gpu, up, ups[gpu], Columns(0, k)) for gpu in everyone)
        w_down = tuple(self._part(g, down, *self._plans.w_down_held(g)) for g in everyone)
        y1_bytes = 2 * m * self._plans.y1_width * BF16_BYTES
        reads = [self._plans.sums_over_gpus or own.width > 0 for own in downs]
        self._workspace = Workspace(
            y1=tuple(arena.alloc(g, y1_bytes) if reads[g] else 0 for g in everyone),
            error=tuple(arena.zeros(gpu, ERROR.itemsize) for gpu in everyone),
        )
        x = tuple(arena.zeros(gpu, m * k * BF16_BYTES) for gpu in everyone)
        y2 = tuple(arena.alloc(gpu, m * n * BF16_BYTES) for gpu in everyone)
        self._own = Operands(x=x, w_up=w_up, w_down=w_down, y2=y2)

    def _part(self, gpu: int, whole: View, rows: Columns, columns: Columns) -> int:
        """The rows and columns of a weight that are `gpu`'s, on it; 0 when there are none."""
        box = rows.width, columns.width * BF16_BYTES
        if not math.prod(box):
            return 0
        gpus, pitch = self._shared.gpus, whole.shape[1] * BF16_BYTES
        pointer = self._arena.alloc(gpu, math.prod(box))
        source = whole.pointer + rows.start * pitch + columns.start * BF16_BYTES
        gpus.copy_box(gpu, pointer, source, box, pitch, on_host=whole.gpu is None)
        gpus.wait(gpu)
        return pointer

    def own_x(self, m: int) -> View:
        """X of m tokens in our own memory on GPU 0: zeros."""
        return View(self._own.x[0], (m, self._problem.k), 0, self)

    def ready(self, m: int, captured: bool) -> Ready:
        """The schedule of m tokens: kept, or built now; while captured it must be there."""
        ready = self._ready.get(m)
        if ready is None:
            if captured:
                raise UsageError(f"call warm_up({m}) before a capture: a schedule needs memory")
            self._evict()
            ready = self._ready[m] = self._build(m)
        if captured:
            self._in_graphs.add(m)
        self._ready.move_to_end(m)
        return ready

    def _evict(self) -> None:
        """If there is no room, free an eighth: what is in no graph and was not used for longest."""
        idle = [m for m in self._ready if m not in self._in_graphs]
        if len(idle) >= SCHEDULES:
            self._shared.drain()
            for m in idle[: max(1, SCHEDULES // 8)]:
                self._ready.pop(m).arena.close()

    def _build(self, m: int) -> Ready:
        problem, config = replace(self._problem, m=m), self._plans.of(m).config
        kernel, gpus = self._shared.kernel(config), self._shared.gpus
        arena = Arena(gpus)
        placed = launch.Mlp(
            gpus,
            arena,
            build(problem, config, self._plans.division),
            [self._own],
            kernel=kernel,
            workspace=self._workspace,
        )
        y = tuple(GpuArray(p, (m, problem.n), g, self) for g, p in enumerate(self._own.y2))
        return Ready(m, placed, kernel, arena, OrderedDict(), y)

    def bound(self, ready: Ready, x: Sequence[View], y: Sequence[View]) -> Bound:
        """A call with X and Y2 at these places, on the first GPUs, and at our own on the others."""
        key = (len(x), *(source.pointer for source in x), *(target.pointer for target in y))
        bound = ready.bound.get(key)
        if bound is None:
            bound = ready.bound[key] = self._bind(ready, key[1 : 1 + len(x)], key[1 + len(x) :])
            if len(ready.bound) > POINTERS:
                ready.bound.popitem(last=False)
        return bound

    def _bind(self, ready: Ready, x: tuple[int, ...], y: tuple[int, ...]) -> Bound:
        x, y = x + self._own.x[len(x) :], y + self._own.y2[len(y) :]
        x_bytes = ready.m * self._problem.k * BF16_BYTES
        y_bytes = ready.m * self._problem.n * BF16_BYTES
        spans = sorted([(p, p + x_bytes) for p in x] + [(p, p + y_bytes) for p in y])
        if any(begin < end for (_, end), (begin, _) in pairwise(spans)):
            # A GPU may store Y2 while another one still reads X.
            raise UsageError("x and out must not overlap, nor may x be the y of the same Mlp")
        words = x_bytes // ALIGNMENT_BYTES
        pulls = [Argument(np.array([to, x[0], words], np.uint64)) for to in x]
        return Bound(ready.kernel, ready.placed.moved(x, y), pulls, {})

    def raise_poll_error(self) -> None:
        """Raise PipelineTimeoutError if a poll of any finished call ran out of time."""
        for gpu, pointer in enumerate(self._workspace.error):
            abi.raise_poll_error(self._shared.gpus, gpu, pointer)

    def close(self) -> None:
        """Wait for everything on the GPUs, and free the memory."""
        self._shared.drain()
        for ready in self._ready.values():
            ready.arena.close()
        self._ready.clear()
        self._arena.close()
