"""An Mlp on two GPUs with random inputs and a reference, for tests that need GPUs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from rank_rig import share_a_gpu

import ctatune
from ctatune.arrays import GpuArray
from ctatune.config import Config
from ctatune.gpus import Arena, Box
from ctatune.layout import pitch
from ctatune.problem import BF16_BYTES, Problem
from ctatune.records import RELATIVE_LIMIT, WORST_LIMIT
from ctatune.verify import Reference

CALLS = int(os.environ.get("CTATUNE_TEST_CALLS", "200"))
MOST, ROWS = 4096, 6000
SMALL, RAGGED, WIDE = (512, 1024, 768), (328, 712, 520), (8192, 8192, 8192)  # k, h, n
LATE_NS = 300_000


class Rig:
    """An Mlp with its reference. The caller's streams are those of the bench.

    A call's X are rows of one large X, copied on the caller's stream into the same buffer before
    each call; Y2 is copied away after it, on the same stream.
    """

    def __init__(
        self, bench: Any, arena: Arena, sizes: tuple[int, int, int], config: Config | None
    ) -> None:
        self.gpus, self.arena, self.rng = bench.gpus, arena, np.random.default_rng(11)
        self.k, self.h, self.n = sizes
        problem = Problem(m=ROWS, k=self.k, h=self.h, n=self.n)
        self.reference = Reference(self.gpus, arena, problem, 5)
        self.streams = [int(stream.handle) for stream in self.gpus.streams[:2]]
        self.x = [arena.alloc(gpu, MOST * self.k * BF16_BYTES) for gpu in range(2)]
        self.out = [arena.alloc(gpu, MOST * self.n * BF16_BYTES) for gpu in range(2)]
        self.kept: list[tuple[int, int, int, int]] = []  # GPU, copy of Y2, first row, rows
        self._copies = Arena(self.gpus)
        weights = (
            self._dense(self.reference.w_up, self.h, self.k),
            self._dense(self.reference.w_down, self.n, self.h),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            choice = ctatune.best(f"64x{self.k}x{self.h}x{self.n}", gpus=2) if config else None
            self.mlp = ctatune.Mlp(
                *weights,
                choice and replace(choice, config=config),
                gpus=2,
                max_m=MOST,
            )

    def _dense(self, weight: int, rows: int, columns: int) -> GpuArray:
        """A copy of a weight of the reference as callers have it."""
        row_bytes = columns * BF16_BYTES
        box = Box(rows, row_bytes, pitch(columns) * BF16_BYTES, row_bytes)
        to = self.arena.alloc(0, rows * row_bytes)
        self.gpus.copy_box(0, to, weight, box, on_host=False)
        self.gpus.wait(0)
        return GpuArray(to, (rows, columns), 0, None)

    def stream(self) -> Any:
        """Another stream on GPU 0."""
        self.gpus.use(0)
        return self.gpus.devices[0].create_stream()

    def x_of(self, m: int, gpu: int = 0) -> GpuArray:
        return GpuArray(self.x[gpu], (m, self.k), gpu, None)

    def out_of(self, m: int, gpu: int = 0) -> GpuArray:
        return GpuArray(self.out[gpu], (m, self.n), gpu, None)

    def fill(self, gpu: int, row: int, m: int) -> None:
        """Enqueue copying rows of X into the buffer of a GPU."""
        row_bytes = self.k * BF16_BYTES
        self.gpus.use(gpu)
        source = self.reference.x + row * row_bytes
        self.gpus.copy(self.x[gpu], source, m * row_bytes, self.gpus.streams[gpu])

    def keep(self, gpu: int, y: GpuArray, row: int) -> None:
        """Enqueue a copy of Y2, to be compared at the end."""
        m, nbytes = y.shape[0], y.shape[0] * self.n * BF16_BYTES
        copy = self._copies.alloc(gpu, nbytes)
        self.gpus.use(gpu)
        self.gpus.copy(copy, y.view.pointer, nbytes, self.gpus.streams[gpu])
        self.kept.append((gpu, copy, row, m))

    def run(self, m: int, everywhere: bool) -> None:
        """Enqueue one call on random rows, with its copies."""
        row = int(self.rng.integers(0, ROWS - m + 1))
        for gpu in range(2 if everywhere else 1):
            self.fill(gpu, row, m)
        x, out = [self.x_of(m, 0), self.x_of(m, 1)], [self.out_of(m, 0), self.out_of(m, 1)]
        if everywhere:
            self.mlp(x, out, stream=self.streams)
        else:
            self.mlp(x[0], out[0], stream=self.streams[0])
        for gpu in range(2 if everywhere else 1):
            self.keep(gpu, out[gpu], row)

    def delay(self, gpus: Any) -> None:
        """Make a random GPU late by up to LATE_NS, on its stream in `gpus`."""
        late_ns = np.int64(self.rng.integers(0, LATE_NS))
        gpus.support("delay", int(self.rng.integers(2)), 1, 1, late_ns)

    def wrong(self) -> list[str]:
        """What differs from the reference among all Y2 that were kept."""
        self.gpus.sync()
        found = [self._fault(*one) for one in self.kept]
        self.kept.clear()
        self._copies.close()
        return [fault for fault in found if fault]

    def _fault(self, gpu: int, y2: int, row: int, m: int) -> str:
        with self.gpus.arena() as arena:
            sums = arena.zeros(gpu, 40)
            wanted = self.reference.y2 + row * self.n * 4
            edges = (np.int32(v) for v in (m, self.n, 0, self.n))
            grid = 4 * self.gpus.sm_count
            self.gpus.support("compare", gpu, grid, 256, y2, wanted, 0, *edges, sums)
            diff2, ref2, worst, nans, _ = self.gpus.download(gpu, sums, (5,), np.float64)
        relative, rms = (diff2 / ref2) ** 0.5, (ref2 / m / self.n) ** 0.5
        if nans == 0 and relative <= RELATIVE_LIMIT and worst <= WORST_LIMIT * rms:
            return ""
        return f"GPU {gpu}, {m} rows from {row}: relative error {relative:.2e}, {nans:g} NaNs"


@contextmanager
def rigged(bench: Any, sizes: tuple[int, int, int], config: Config | None = None) -> Iterator[Rig]:
    """`config`: what all calls run, else the library chooses."""
    if bench.gpus.ranks > 1:
        share_a_gpu(bench.gpus.ranks)
    with bench.gpus.arena() as arena:
        rig = Rig(bench, arena, sizes, config)
        with rig.mlp:
            yield rig


def some_tokens(rig: Rig, count: int = 24) -> list[int]:
    """Numbers of tokens of every kind of tile, ready to be called."""
    edges = [1, 2, 16, 17, 64, 65, 128, 129, 256, 300, 512, 1024, 2047, 2048, MOST]
    found = [*edges, *(int(m) for m in rig.rng.integers(1, MOST + 1, count - len(edges)))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rig.mlp.warm_up(*found)
    return found
