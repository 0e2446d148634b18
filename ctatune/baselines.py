"""The opponents: ways to run the problem without our kernel (DESIGN 9), each a method like ours.

They need the extra `baselines`; `why_not` says what lacks or which rule a problem breaks.
"""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import importlib.util
from functools import cached_property
from typing import Protocol

from cuda.core import EventOptions

from ctatune.config import Baseline
from ctatune.cublas import Cublas, Sizes
from ctatune.gpus import Arena, Gpus
from ctatune.launch import BF16_BYTES
from ctatune.operands import Inputs, cold_sets
from ctatune.problem import Problem
from ctatune.reduce import NcclAllReduce, TwoShotReduce
from ctatune.schedule import Columns, split_columns


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
    if problem.gpus < 2 or problem.output != "replicated":
        return f"{baseline.method} needs two GPUs and leaves Y2 replicated"
    if baseline.method == "microbatch" and problem.gpus != 2:
        return "microbatch has one GPU a stage: needs 2 GPUs"
    if baseline.method == "microbatch" and baseline.chunk >= problem.m:
        return f"a chunk must have fewer rows than there are ({problem.m}), got {baseline.chunk}"
    return None


class Method(Protocol):
    """What every baseline is: enqueues calls, and says where its Y2 is."""

    y2: dict[int, int]

    def call(self, which: int = 0) -> None:
        """Enqueue one call on operand set `which` (modulo the number of sets)."""
        ...

    def check(self) -> None:
        """Raise PipelineTimeoutError if a finished call waited in vain."""
        ...


class Product(Protocol):
    """Computes Y = X W^T on a GPU: `Cublas.tune` or `Cublas.gemm`."""

    def __call__(self, gpu: int, x: int, w: int, y: int, sizes: Sizes) -> None: ...


class Libraries:
    """cuBLAS and NCCL of one process, started when they are first needed."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    @cached_property
    def blas(self) -> Cublas:
        return Cublas(self._gpus)

    @cached_property
    def nccl(self) -> NcclAllReduce:
        return NcclAllReduce(self._gpus)


def prepare(baseline: Baseline, libraries: Libraries, arena: Arena, inputs: Inputs) -> Method:
    """A baseline with its weights placed and its workspace allocated."""
    kinds = {"single": _RowSplit, "rowsplit": _RowSplit, "microbatch": _MicroBatch}
    return kinds.get(baseline.method, _TensorParallel)(baseline, libraries, arena, inputs)


class _RowSplit:
    """Each GPU runs its rows through both layers with all weights, then copies Y2 to its peers.

    On one GPU this is `single`.
    """

    def __init__(
        self, baseline: Baseline, libraries: Libraries, arena: Arena, inputs: Inputs
    ) -> None:
        problem, gpus = inputs.problem, inputs.gpus
        self._problem, self._gpus, self._blas = problem, gpus, libraries.blas
        count = 1 if baseline.method == "single" else problem.gpus
        self._rows = split_columns(problem.m, 1, [1 / count] * count)
        self.y2 = {gpu: inputs.y2(gpu) for gpu in range(count)}
        self._y1 = [
            arena.alloc(gpu, max(1, rows.width) * problem.h * BF16_BYTES)
            for gpu, rows in enumerate(self._rows)
        ]
        up, down = Columns(0, problem.h), Columns(0, problem.n)
        sets = cold_sets(gpus, problem.weight_bytes // BF16_BYTES)
        self._sets = [
            [
                (inputs.x(g, i, rows), inputs.w_up(g, up, i), inputs.w_down(g, down, i))
                for g, rows in enumerate(self._rows)
            ]
            for i in range(sets)
        ]
        self._joints = _Joints(gpus, count)
        self._products(libraries.blas.tune, 0)

    def _products(self, run: Product, which: int) -> None:
        """`run` both layers of every GPU that has rows."""
        problem = self._problem
        for gpu, (x, w_up, w_down) in enumerate(self._sets[which % len(self._sets)]):
            if rows := self._rows[gpu].width:
                y2 = self.y2[gpu] + self._offset(gpu)
                run(gpu, x, w_up, self._y1[gpu], (rows, problem.h, problem.k))
                run(gpu, self._y1[gpu], w_down, y2, (rows, problem.n, problem.h))

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
        self._joints.join()

    def check(self) -> None:
        """Nothing polls here."""


class _Joints:
    """Makes the streams of the first `count` GPUs wait for each other."""

    def __init__(self, gpus: Gpus, count: int) -> None:
        self._gpus = gpus
        self._events = [_event(gpus, gpu) for gpu in range(count)]

    def join(self) -> None:
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


class _TensorParallel:
    """Megatron's split: rows of W_up, columns of W_down, and a sum of bf16 partials of Y2."""

    def __init__(
        self, baseline: Baseline, libraries: Libraries, arena: Arena, inputs: Inputs
    ) -> None:
        problem, gpus = inputs.problem, inputs.gpus
        self._problem, self._blas = problem, libraries.blas
        everyone = range(problem.gpus)
        self._parts = split_columns(problem.h, 64, [1 / problem.gpus] * problem.gpus)
        self.y2 = {gpu: inputs.y2(gpu) for gpu in everyone}
        self._y1 = [
            arena.alloc(g, problem.m * part.width * BF16_BYTES)
            for g, part in enumerate(self._parts)
        ]
        widest = max(part.width for part in self._parts)
        sets = cold_sets(gpus, widest * (problem.k + problem.n))
        down = Columns(0, problem.n)
        self._sets = [
            [
                (inputs.x(g, i), inputs.w_up(g, part, i), inputs.w_down(g, down, i, part))
                for g, part in enumerate(self._parts)
            ]
            for i in range(sets)
        ]
        elements = problem.m * problem.n
        y2 = list(self.y2.values())
        if baseline.method == "tp":
            self._partials = y2
            nccl = libraries.nccl
            self._reduce, self.check = lambda: nccl.enqueue(y2, elements), nccl.check
        else:
            self._partials = [inputs.y2(gpu) for gpu in everyone]
            two_shot = TwoShotReduce(gpus, arena, self._partials, y2, elements)
            self._reduce, self.check = two_shot.enqueue, two_shot.check
        self._products(libraries.blas.tune, 0)

    def _products(self, run: Product, which: int) -> None:
        m, k, n = self._problem.m, self._problem.k, self._problem.n
        for gpu, (x, w_up, w_down) in enumerate(self._sets[which % len(self._sets)]):
            width = self._parts[gpu].width
            run(gpu, x, w_up, self._y1[gpu], (m, width, k))
            run(gpu, self._y1[gpu], w_down, self._partials[gpu], (m, n, width))

    def call(self, which: int = 0) -> None:
        self._products(self._blas.gemm, which)
        self._reduce()


class _MicroBatch:
    """`up` on GPU 0, `down` on GPU 1, chunk by chunk; Y1 and Y2 travel by copy engine."""

    def __init__(
        self, baseline: Baseline, libraries: Libraries, arena: Arena, inputs: Inputs
    ) -> None:
        problem, gpus = inputs.problem, inputs.gpus
        self._problem, self._gpus, self._blas = problem, gpus, libraries.blas
        self._chunks = [
            Columns(row, min(row + baseline.chunk, problem.m))
            for row in range(0, problem.m, baseline.chunk)
        ]
        self.y2 = {gpu: inputs.y2(gpu) for gpu in range(2)}
        self._y1 = [arena.alloc(gpu, problem.m * problem.h * BF16_BYTES) for gpu in range(2)]
        up, down = Columns(0, problem.h), Columns(0, problem.n)
        sets = cold_sets(gpus, min(problem.h * problem.k, problem.n * problem.h))
        self._sets = [
            (inputs.x(0, i), inputs.w_up(0, up, i), inputs.w_down(1, down, i)) for i in range(sets)
        ]
        self._copies = []
        for gpu in range(2):
            gpus.use(gpu)
            self._copies.append(gpus.devices[gpu].create_stream())
        self._done = [[_event(gpus, gpu) for _ in self._chunks] for gpu in range(2)]
        self._sent = [[_event(gpus, gpu) for _ in self._chunks] for gpu in range(2)]
        for i in range(len(self._chunks)):
            for gpu in range(2):
                self._product(libraries.blas.tune, gpu, i, 0)

    def _product(self, run: Product, gpu: int, chunk: int, which: int) -> None:
        """`run` the layer of `gpu` on a chunk."""
        problem, rows = self._problem, self._chunks[chunk]
        x, w_up, w_down = self._sets[which % len(self._sets)]
        part, w, inputs, outputs = (
            (_row(x, rows.start, problem.k), w_up, problem.k, problem.h)
            if gpu == 0
            else (_row(self._y1[1], rows.start, problem.h), w_down, problem.h, problem.n)
        )
        y = _row((self._y1[0], self.y2[1])[gpu], rows.start, outputs)
        run(gpu, part, w, y, (rows.width, outputs, inputs))

    def call(self, which: int = 0) -> None:
        h, n = self._problem.h, self._problem.n
        for i, rows in enumerate(self._chunks):
            self._product(self._blas.gemm, 0, i, which)
            y1 = [_row(y, rows.start, h) for y in self._y1]
            self._send(0, i, y1[1], y1[0], rows.width * h)
            self._gpus.use(1)
            self._gpus.streams[1].wait(self._sent[0][i])
            self._product(self._blas.gemm, 1, i, which)
            y2 = [_row(y, rows.start, n) for y in self.y2.values()]
            self._send(1, i, y2[0], y2[1], rows.width * n)
        for gpu in range(2):  # a call ends on GPU 0 when Y2 is there, on GPU 1 when it was sent
            self._gpus.use(gpu)
            self._gpus.streams[gpu].wait(self._sent[1][-1])

    def _send(self, gpu: int, chunk: int, to: int, source: int, elements: int) -> None:
        """Copy what GPU `gpu` computed last, on its copy stream."""
        self._gpus.use(gpu)
        copies, done = self._copies[gpu], self._done[gpu][chunk]
        self._gpus.streams[gpu].record(done)
        copies.wait(done)
        self._gpus.copy(to, source, elements * BF16_BYTES, copies)
        copies.record(self._sent[gpu][chunk])

    def check(self) -> None:
        """Nothing polls here."""


def _row(matrix: int, row: int, columns: int) -> int:
    """Where a row of a matrix begins."""
    return matrix + row * columns * BF16_BYTES


def _event(gpus: Gpus, gpu: int) -> object:
    gpus.use(gpu)
    return gpus.devices[gpu].create_event(EventOptions(timing_enabled=False))
