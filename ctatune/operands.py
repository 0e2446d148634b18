"""Inputs of a problem on the GPUs: random, seeded, the same matrix however it is split."""

from __future__ import annotations

import numpy as np

from ctatune.gpus import Arena, Gpus
from ctatune.launch import BF16_BYTES, Operands
from ctatune.problem import Problem
from ctatune.schedule import DOWN, UP, Columns, Schedule

_X, _W_UP, _W_DOWN = 0, 1, 2
MAX_SETS = 32


def fill(
    gpus: Gpus,
    gpu: int,
    pointer: int,
    sizes: tuple[int, int],
    *,
    row0: int,
    seed: int,
    scale: float,
) -> None:
    """Rows [row0, row0 + rows) of a rows x columns bf16 matrix of N(0, scale^2)."""
    rows, columns = (np.int64(size) for size in sizes)
    gpus.support(
        "fill_normal",
        gpu,
        4 * gpus.sm_count,
        256,
        pointer,
        rows,
        columns,
        np.int64(row0),
        np.uint64(seed),
        np.float32(scale),
    )


class Inputs:
    """Fills the matrices of one problem. X is N(0, 1); weights keep Y1 and Y2 near N(0, 1)."""

    def __init__(self, gpus: Gpus, arena: Arena, problem: Problem, seed: int) -> None:
        self._gpus, self._arena, self._problem, self._seed = gpus, arena, problem, seed

    def _matrix(self, gpu: int, kind: int, which: int, rows: Columns, inputs: int) -> int:
        if not rows.width:
            return 0
        pointer = self._arena.alloc(gpu, rows.width * inputs * BF16_BYTES)
        fill(
            self._gpus,
            gpu,
            pointer,
            (rows.width, inputs),
            row0=rows.start,
            seed=(self._seed * MAX_SETS + which) * 3 + kind,
            scale=1.0 if kind == _X else inputs**-0.5,
        )
        return pointer

    def x(self, gpu: int, which: int = 0) -> int:
        """X, m x k, of set `which`."""
        return self._matrix(gpu, _X, which, Columns(0, self._problem.m), self._problem.k)

    def w_up(self, gpu: int, rows: Columns, which: int = 0) -> int:
        """The given rows of W_up, each k long; 0 when there are none."""
        return self._matrix(gpu, _W_UP, which, rows, self._problem.k)

    def w_down(self, gpu: int, rows: Columns, which: int = 0) -> int:
        """The given rows of W_down, each h long; 0 when there are none."""
        return self._matrix(gpu, _W_DOWN, which, rows, self._problem.h)

    def y2(self, gpu: int) -> int:
        """Room for Y2, m x n."""
        return self._arena.alloc(gpu, self._problem.m * self._problem.n * BF16_BYTES)


def cold_sets(gpus: Gpus, schedule: Schedule) -> int:
    """How many operand sets rotate so that no call finds its weights in L2 (twice L2 between)."""
    problem = schedule.problem
    smallest = min(
        (schedule.columns[UP][g].width + problem.m) * problem.k
        + schedule.columns[DOWN][g].width * problem.h
        for g in range(problem.gpus)
    )
    return min(MAX_SETS, max(2, 2 * gpus.l2_bytes // (smallest * BF16_BYTES) + 2))


def place(inputs: Inputs, schedule: Schedule, sets: int) -> list[Operands]:
    """`sets` operand sets for a schedule; all of them write the same Y2."""
    everyone = range(schedule.problem.gpus)
    y2 = tuple(inputs.y2(gpu) for gpu in everyone)
    return [
        Operands(
            x=tuple(inputs.x(gpu, which) for gpu in everyone),
            w_up=tuple(inputs.w_up(g, schedule.columns[UP][g], which) for g in everyone),
            w_down=tuple(inputs.w_down(g, schedule.columns[DOWN][g], which) for g in everyone),
            y2=y2,
        )
        for which in range(sets)
    ]
