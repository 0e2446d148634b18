"""Micro-batching: `up` on GPU 0, `down` on GPU 1, chunk by chunk; Y1 and Y2 go by copy engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ctatune.config import Baseline
from ctatune.cublas import Cublas
from ctatune.gemm import Gemm
from ctatune.gpus import Arena, Gpus
from ctatune.layout import Sizes, pitch
from ctatune.methods import Libraries
from ctatune.operands import Inputs, cold_sets
from ctatune.problem import BF16_BYTES
from ctatune.schedule import Columns
from ctatune.space import default_config

_GPUS = range(2)
_Operands = Callable[[int, int, int], tuple[int, int, int, Sizes]]  # of (gpu, chunk, which)


class _BlasGemms:
    """The products of a call, `up` of each chunk on GPU 0, `down` on GPU 1: by cuBLAS."""

    kernel = None

    def __init__(self, blas: Cublas, operands: _Operands, chunks: int) -> None:
        self._blas, self._operands = blas, operands
        for chunk in range(chunks):
            for gpu in _GPUS:
                blas.tune(gpu, *operands(gpu, chunk, 0))

    def __call__(self, gpu: int, chunk: int, which: int) -> None:
        self._blas.gemm(gpu, *self._operands(gpu, chunk, which))

    def check(self) -> None:
        """Nothing polls here."""


class _OurGemms:
    """The same by our kernel with the default config of a chunk; one `Gemm` a size of chunks."""

    def __init__(
        self, arena: Arena, inputs: Inputs, operands: _Operands, chunks: list[Columns], sets: int
    ) -> None:
        self._sets = sets
        self._all: list[Gemm] = []
        self._of: dict[tuple[int, int], tuple[Gemm, int]] = {}  # with the first set of a chunk
        for rows in dict.fromkeys(chunk.width for chunk in chunks):
            config = default_config(replace(inputs.problem, m=rows, gpus=1))
            same = [i for i, chunk in enumerate(chunks) if chunk.width == rows]
            for gpu in _GPUS:
                found = [operands(gpu, chunk, which) for chunk in same for which in range(sets)]
                sizes = found[0][-1]
                pointers = [(x, w, y) for x, w, y, _ in found]
                gemm = Gemm(inputs.gpus, arena, gpu, config, sizes, pointers)
                self._all.append(gemm)
                self._of |= {(gpu, chunk): (gemm, i * sets) for i, chunk in enumerate(same)}
        self.kernel = self._all[0].build()

    def __call__(self, gpu: int, chunk: int, which: int) -> None:
        gemm, first = self._of[gpu, chunk]
        gemm.call(first + which % self._sets)

    def check(self) -> None:
        for gemm in self._all:
            gemm.check()


class MicroBatch:
    """The pipeline of chunks; a call ends on a GPU when its Y2 is there and was sent."""

    def __init__(
        self, baseline: Baseline, libraries: Libraries, arena: Arena, inputs: Inputs
    ) -> None:
        problem, gpus = inputs.problem, inputs.gpus
        self._problem, self._gpus = problem, gpus
        self._chunks = [
            Columns(row, min(row + baseline.chunk, problem.m))
            for row in range(0, problem.m, baseline.chunk)
        ]
        count = len(self._chunks)
        self.y2 = {gpu: inputs.y2(gpu) for gpu in _GPUS}
        self._y1 = [arena.alloc(gpu, problem.m * pitch(problem.h) * BF16_BYTES) for gpu in _GPUS]
        up, down = Columns(0, problem.h), Columns(0, problem.n)
        self.sets = cold_sets(gpus, min(problem.h * problem.k, problem.n * problem.h))
        self._sets = [
            (inputs.x(0, i), inputs.w_up(0, up, i), inputs.w_down(1, down, i))
            for i in range(self.sets)
        ]
        self._gemms = (
            _BlasGemms(libraries.blas, self._operands, count)
            if baseline.method == "microbatch"
            else _OurGemms(arena, inputs, self._operands, self._chunks, self.sets)
        )
        self.kernel, self.check = self._gemms.kernel, self._gemms.check
        self._copies = [_stream(gpus, gpu) for gpu in _GPUS]
        self._done = [[gpus.event(gpu) for _ in range(count)] for gpu in _GPUS]
        self._sent = [[gpus.event(gpu) for _ in range(count)] for gpu in _GPUS]

    def _operands(self, gpu: int, chunk: int, which: int) -> tuple[int, int, int, Sizes]:
        """X, W, Y and sizes of the product of a GPU on a chunk."""
        problem, rows = self._problem, self._chunks[chunk]
        k, h, n = problem.k, problem.h, problem.n
        x, w_up, w_down = self._sets[which % self.sets]
        y1 = _row(self._y1[gpu], rows.start, pitch(h))
        if gpu == 0:
            return _row(x, rows.start, k), w_up, y1, Sizes.up(rows.width, k, h)
        return y1, w_down, _row(self.y2[1], rows.start, n), Sizes.down(rows.width, h, n)

    def call(self, which: int = 0) -> None:
        h, n = pitch(self._problem.h), self._problem.n
        for i, rows in enumerate(self._chunks):
            self._gemms(0, i, which)
            y1 = [_row(y, rows.start, h) for y in self._y1]
            self._send(0, i, y1[1], y1[0], rows.width * h)
            self._gpus.use(1)
            self._gpus.streams[1].wait(self._sent[0][i])
            self._gemms(1, i, which)
            y2 = [_row(y, rows.start, n) for y in self.y2.values()]
            self._send(1, i, y2[0], y2[1], rows.width * n)
        for gpu in _GPUS:  # a call ends on GPU 0 when Y2 is there, on GPU 1 when it was sent
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


def _row(matrix: int, row: int, columns: int) -> int:
    """Where a row of a matrix begins."""
    return matrix + row * columns * BF16_BYTES


def _stream(gpus: Gpus, gpu: int) -> Any:
    gpus.use(gpu)
    return gpus.devices[gpu].create_stream()
