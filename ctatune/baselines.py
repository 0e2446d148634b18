"""The opponents: ways to run the problem without our kernel (DESIGN 9), each a method like ours.

They need the extra `baselines`; `why_not` says what lacks or which rule a problem breaks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from ctatune.config import Baseline
from ctatune.gpus import Arena
from ctatune.graphs import Graphed
from ctatune.layout import Sizes, pitch
from ctatune.methods import Libraries, Method
from ctatune.microbatch import MicroBatch
from ctatune.operands import Inputs, cold_sets
from ctatune.problem import BF16_BYTES, Problem
from ctatune.reduce import TwoShotReduce
from ctatune.schedule import Columns, split_columns
from ctatune.timing import LAUNCHES, MIN_CALLS, QUEUE

_Product = Callable[[int, int, int, int, Sizes], None]  # (gpu, x, w, y, sizes): tune or gemm


def why_missing() -> str | None:
    """What baselines need and this machine lacks, or None."""
    for module, wheel in (("nvmath", "nvmath-python"), ("nccl", "nccl4py")):
        if importlib.util.find_spec(module) is None:
            return f"{wheel} is not installed (extra `baselines`)"
    return None


def why_not(baseline: Baseline, problem: Problem) -> str | None:
    """Why a baseline cannot run a problem on this machine, or None."""
    if missing := why_missing():
        return missing
    if baseline.method == "single":
        return None
    if problem.gpus < 2:
        return f"{baseline.method} needs two GPUs"
    if baseline.chunk and problem.gpus != 2:
        return f"{baseline.method} has one GPU a stage: needs 2 GPUs"
    if baseline.chunk and baseline.chunk >= problem.m:
        return f"a chunk must have fewer rows than there are ({problem.m}), got {baseline.chunk}"
    if MIN_CALLS * launches(baseline, problem) > QUEUE:
        return f"chunks must not fill the queue of a stream, {baseline.chunk} rows are too few"
    return None


def launches(baseline: Baseline, problem: Problem) -> int:
    """How many operations a call enqueues on one stream, at most."""
    if not baseline.chunk:
        return LAUNCHES
    # Of each chunk: a product in split-K with its sum, and the events around it; then the join.
    return 6 * -(-problem.m // baseline.chunk) + 2


def prepare(baseline: Baseline, libraries: Libraries, arena: Arena, inputs: Inputs) -> Method:
    """A baseline with its weights placed, its workspace allocated and its products tuned."""
    if baseline.chunk:
        return MicroBatch(baseline, libraries, arena, inputs)
    kind = _RowSplit if baseline.method in ("single", "rowsplit") else _TensorParallel
    method = kind(baseline, libraries, arena, inputs)
    return Graphed(inputs.gpus, arena, method, str(baseline)) if baseline.graph else method


class _RowSplit:
    """Each GPU runs its rows through both layers with all weights, then copies Y2 to its peers.

    On one GPU this is `single`.
    """

    kernel = None

    def __init__(
        self, baseline: Baseline, libraries: Libraries, arena: Arena, inputs: Inputs
    ) -> None:
        problem, gpus = inputs.problem, inputs.gpus
        self._problem, self._gpus, self._blas = problem, gpus, libraries.blas
        count = 1 if baseline.method == "single" else problem.gpus
        self._rows = split_columns(problem.m, 1, [1 / count] * count)
        self.y2 = {gpu: inputs.y2(gpu) for gpu in range(count)}
        self._y1 = [
            arena.alloc(gpu, max(1, rows.width) * pitch(problem.h) * BF16_BYTES)
            for gpu, rows in enumerate(self._rows)
        ]
        up, down = Columns(0, problem.h), Columns(0, problem.n)
        self.sets = cold_sets(
            gpus, problem.weight_bytes // BF16_BYTES + self._rows[0].width * problem.k
        )
        self._sets = [
            [
                (inputs.x(g, i, rows), inputs.w_up(g, up, i), inputs.w_down(g, down, i))
                for g, rows in enumerate(self._rows)
            ]
            for i in range(self.sets)
        ]
        self._events = [gpus.event(gpu) for gpu in range(count)]
        self._products(libraries.blas.tune, 0)

    def _products(self, run: _Product, which: int) -> None:
        """`run` both layers of every GPU that has rows."""
        k, h, n = self._problem.k, self._problem.h, self._problem.n
        for gpu, (x, w_up, w_down) in enumerate(self._sets[which % self.sets]):
            if rows := self._rows[gpu].width:
                y2 = self.y2[gpu] + self._offset(gpu)
                run(gpu, x, w_up, self._y1[gpu], Sizes.up(rows, k, h))
                run(gpu, self._y1[gpu], w_down, y2, Sizes.down(rows, h, n))

    def _offset(self, gpu: int) -> int:
        return self._rows[gpu].start * self._problem.n * BF16_BYTES

    def call(self, which: int = 0) -> None:
        self._products(self._blas.gemm, which)
        for gpu, y2 in self.y2.items():
            offset, stream = self._offset(gpu), self._gpus.streams[gpu]
            nbytes = self._rows[gpu].width * self._problem.n * BF16_BYTES
            for peer, to in self.y2.items():
                if peer != gpu and nbytes:
                    self._gpus.copy(to + offset, y2 + offset, nbytes, stream)
        self._join()

    def _join(self) -> None:
        """What is enqueued after this on any stream waits for what was enqueued on all."""
        if len(self._events) == 1:
            return
        for gpu, event in enumerate(self._events):
            self._gpus.use(gpu)
            self._gpus.streams[gpu].record(event)
        for gpu in range(len(self._events)):
            self._gpus.use(gpu)
            for peer, event in enumerate(self._events):
                if peer != gpu:
                    self._gpus.streams[gpu].wait(event)

    def check(self) -> None:
        """Nothing polls here."""


class _TensorParallel:
    """Megatron's split: rows of W_up, columns of W_down, and a sum of bf16 partials of Y2."""

    kernel = None

    def __init__(
        self, baseline: Baseline, libraries: Libraries, arena: Arena, inputs: Inputs
    ) -> None:
        problem, gpus = inputs.problem, inputs.gpus
        self._problem, self._blas = problem, libraries.blas
        everyone = range(problem.gpus)
        self._parts = split_columns(problem.h, 64, [1 / problem.gpus] * problem.gpus)
        self.y2 = {gpu: inputs.y2(gpu) for gpu in everyone}
        self._y1 = [
            arena.alloc(g, problem.m * pitch(part.width) * BF16_BYTES)
            for g, part in enumerate(self._parts)
        ]
        widest = max(part.width for part in self._parts)
        self.sets = cold_sets(gpus, widest * (problem.k + problem.n) + problem.m * problem.k)
        down = Columns(0, problem.n)
        self._sets = [
            [
                (inputs.x(g, i), inputs.w_up(g, part, i), inputs.w_down(g, down, i, part))
                for g, part in enumerate(self._parts)
            ]
            for i in range(self.sets)
        ]
        elements = problem.m * problem.n
        y2 = list(self.y2.values())
        if baseline.method == "tp":
            self._partials = y2
            nccl = libraries.nccl(baseline.nccl)
            self._reduce, self.check = lambda: nccl.enqueue(y2, elements), nccl.check
        else:
            self._partials = [inputs.y2(gpu) for gpu in everyone]
            two_shot = TwoShotReduce(gpus, arena, self._partials, y2, elements)
            self._reduce, self.check = two_shot.enqueue, two_shot.check
        self._products(libraries.blas.tune, 0)

    def _products(self, run: _Product, which: int) -> None:
        m, k, n = self._problem.m, self._problem.k, self._problem.n
        for gpu, (x, w_up, w_down) in enumerate(self._sets[which % self.sets]):
            width = self._parts[gpu].width
            run(gpu, x, w_up, self._y1[gpu], Sizes.up(m, k, width))
            run(gpu, self._y1[gpu], w_down, self._partials[gpu], Sizes.down(m, width, n))

    def call(self, which: int = 0) -> None:
        self._products(self._blas.gemm, which)
        self._reduce()
