"""Inputs of a problem on the GPUs: random, seeded, the same matrix however it is split."""

from __future__ import annotations

import math

import numpy as np

from ctatune.gpus import Arena, Gpus
from ctatune.launch import Operands
from ctatune.layout import pitch
from ctatune.problem import BF16_BYTES, Problem
from ctatune.schedule import UP, Columns, Schedule

_X, _W_UP, _W_DOWN = 0, 1, 2
MAX_SETS = 256  # enough for 0.5 MB a set
PLACES = 8  # with two or three, two entries of one config differed by 1 .. 2 % in 4 of 50 pairs
PLACES_BYTES = 2 << 30  # of one contestant on one GPU


class Inputs:
    """Fills the matrices of one problem. X is N(0, 1); weights keep Y1 and Y2 near N(0, 1)."""

    def __init__(self, gpus: Gpus, arena: Arena, problem: Problem, seed: int) -> None:
        self.gpus, self.problem = gpus, problem
        self._arena, self._seed = arena, seed

    def _matrix(
        self, gpu: int, kind: int, which: int, rows: Columns, columns: Columns, width: int
    ) -> int:
        """Some rows and columns of a matrix that is `width` columns wide; 0 for none."""
        if not rows.width * columns.width:
            return 0
        row_pitch = columns.width if kind == _X else pitch(columns.width)
        pointer = self._arena.alloc(gpu, rows.width * row_pitch * BF16_BYTES)
        sizes = (rows.width, columns.width, rows.start, columns.start, width, row_pitch)
        self.gpus.support(
            "fill_normal",
            gpu,
            4 * self.gpus.sm_count,
            256,
            pointer,
            *(np.int64(size) for size in sizes),
            np.uint64((self._seed * MAX_SETS + which) * 3 + kind),
            np.float32(1.0 if kind == _X else width**-0.5),
        )
        return pointer

    def x(self, gpu: int, which: int = 0, rows: Columns | None = None) -> int:
        """The given rows (all) of X, each k long, of set `which`."""
        k = self.problem.k
        rows = rows or Columns(0, self.problem.m)
        return self._matrix(gpu, _X, which, rows, Columns(0, k), k)

    def w_up(self, gpu: int, rows: Columns, which: int = 0) -> int:
        """The given rows of W_up, each k long; 0 when there are none."""
        k = self.problem.k
        return self._matrix(gpu, _W_UP, which, rows, Columns(0, k), k)

    def w_down(
        self, gpu: int, rows: Columns, which: int = 0, columns: Columns | None = None
    ) -> int:
        """The given rows of W_down and columns (all h) of them; 0 when there are none."""
        h = self.problem.h
        return self._matrix(gpu, _W_DOWN, which, rows, columns or Columns(0, h), h)

    def y2(self, gpu: int) -> int:
        """Room for Y2, m x n."""
        return self._arena.alloc(gpu, self.problem.m * self.problem.n * BF16_BYTES)


def cold_sets(gpus: Gpus, elements: int) -> int:
    """How many operand sets rotate so that no call finds its weights in L2 (twice L2 between), and
    that where they lie hardly matters.

    `elements` of weights and X are read in a call on the GPU that reads least.
    """
    nbytes = elements * BF16_BYTES
    return min(MAX_SETS, max(2 * gpus.l2_bytes // nbytes + 2, min(PLACES, PLACES_BYTES // nbytes)))


def elements_read(schedule: Schedule) -> int:
    """Elements of weights and X that the GPU with the fewest reads in a call."""
    problem = schedule.problem
    return min(
        (schedule.columns[UP][g].width + problem.m) * problem.k
        + math.prod(part.width for part in schedule.w_down_held(g))
        for g in range(problem.gpus)
    )


def _w_down(inputs: Inputs, schedule: Schedule, gpu: int, which: int) -> int:
    rows, columns = schedule.w_down_held(gpu)
    return inputs.w_down(gpu, rows, which, columns)


def place(inputs: Inputs, schedule: Schedule, sets: int) -> list[Operands]:
    """`sets` operand sets for a schedule; all of them write the same Y2."""
    everyone = range(schedule.problem.gpus)
    y2 = tuple(inputs.y2(gpu) for gpu in everyone)
    return [
        Operands(
            x=tuple(inputs.x(gpu, which) for gpu in everyone),
            w_up=tuple(inputs.w_up(g, schedule.columns[UP][g], which) for g in everyone),
            w_down=tuple(_w_down(inputs, schedule, g, which) for g in everyone),
            y2=y2,
        )
        for which in range(sets)
    ]
