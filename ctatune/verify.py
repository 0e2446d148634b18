"""Compares a method's output with a double-precision reference and with the one-GPU kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ctatune.config import Config
from ctatune.contestants import Contestant
from ctatune.gpus import Arena, Gpus
from ctatune.launch import Operands, PlacedSchedule
from ctatune.layout import pitch
from ctatune.operands import Inputs
from ctatune.problem import BF16_BYTES, Problem
from ctatune.records import RELATIVE_LIMIT, WORST_LIMIT, Verification
from ctatune.schedule import Columns, Schedule, alone, build

BURST = (4, 3, 2, 1, 0)  # operand sets of calls in flight together; the last one is compared
_REFERENCE_TILE = 64


class Reference:
    """Y2 of one problem and seed in fp32 (summed in double, Y1 rounded to bf16) on GPU 0."""

    def __init__(self, gpus: Gpus, arena: Arena, problem: Problem, seed: int) -> None:
        inputs = Inputs(gpus, arena, problem, seed)
        self.problem, self.seed, self._gpus = problem, seed, gpus
        self.x = inputs.x(0)
        self.w_up = inputs.w_up(0, Columns(0, problem.h))
        self.w_down = inputs.w_down(0, Columns(0, problem.n))
        self.y2 = arena.alloc(0, problem.m * problem.n * 4)
        with gpus.arena() as own:
            y1 = own.alloc(0, problem.m * problem.h * BF16_BYTES)
            self._gemm(self.x, self.w_up, y1, 0, problem.h, problem.k)
            self._gemm(y1, self.w_down, 0, self.y2, problem.n, problem.h)
            gpus.sync()

    def _gemm(self, a: int, b: int, half: int, full: int, n: int, k: int) -> None:
        grid = (-(-n // _REFERENCE_TILE), -(-self.problem.m // _REFERENCE_TILE))
        sizes = (np.int32(size) for size in (self.problem.m, n, k, k, pitch(k)))
        self._gpus.support("reference_gemm", 0, grid, 256, a, b, half, full, *sizes)

    def one_gpu(self, arena: Arena, schedule: Schedule) -> int:
        """Y2 (bf16, on GPU 0, in `arena`) of the same kernel with the same tiles on one GPU."""
        nbytes = self.problem.m * self.problem.n * BF16_BYTES
        y2 = arena.alloc(0, nbytes)
        self._gpus.fill(0, y2, 0xFF, nbytes)
        operands = Operands(x=(self.x,), w_up=(self.w_up,), w_down=(self.w_down,), y2=(y2,))
        placed = PlacedSchedule(self._gpus, arena, alone(schedule), [operands])
        placed.call()
        self._gpus.sync()
        placed.check()
        return y2


def verify(
    gpus: Gpus,
    reference: Reference,
    y2: dict[int, int],
    run: Callable[[], None],
    *,
    where: list[tuple[int, Columns]],
    bits: int = 0,
) -> Verification:
    """Poison Y2 (a pointer for each GPU), `run` once, and compare what was promised `where`.

    `bits` is a bf16 Y2 on GPU 0 that must be equal bit for bit; 0 for none.
    """
    problem = reference.problem
    for gpu, pointer in y2.items():
        gpus.fill(gpu, pointer, 0xFF, problem.m * problem.n * BF16_BYTES)
    gpus.sync()
    run()
    gpus.sync()
    sums = np.zeros(5)
    with gpus.arena() as arena:
        for gpu, columns in where:
            result = arena.zeros(gpu, sums.nbytes)
            edges = (np.int32(v) for v in (problem.m, problem.n, columns.start, columns.stop))
            grid = 4 * gpus.sm_count
            args = (y2[gpu], reference.y2, bits, *edges, result)
            gpus.support("compare", gpu, grid, 256, *args)
            part = gpus.download(gpu, result, (5,), np.float64)
            sums = np.where([0, 0, 1, 0, 0], np.maximum(sums, part), sums + part)
    return _judge(sums, reference.seed, problem, where, bits=bool(bits))


def _judge(
    sums: np.ndarray, seed: int, problem: Problem, where: list[tuple[int, Columns]], *, bits: bool
) -> Verification:
    diff2, ref2, worst, nans, differ = (float(value) for value in sums)
    elements = problem.m * sum(columns.width for _, columns in where)
    rms = math.sqrt(ref2 / elements)
    relative = math.sqrt(diff2 / ref2) if ref2 else math.inf
    worst = worst / rms if rms else math.inf
    equal = differ == 0 and nans == 0 if bits else None
    good = nans == 0 and relative <= RELATIVE_LIMIT and worst <= WORST_LIMIT and equal is not False
    return Verification(
        passed=good,
        seed=seed,
        relative_error=relative,
        worst_error=worst,
        nans=int(nans),
        bitwise_equal=equal,
    )


class Prover:
    """Compares one contestant's Y2 with the reference of the same inputs.

    `arena` holds what is compared bit for bit; it must live as long as this.
    """

    def __init__(
        self, gpus: Gpus, arena: Arena, reference: Reference, contestant: Contestant
    ) -> None:
        self._gpus, self._contestant, self._reference = gpus, contestant, reference
        config = contestant.config
        ours = isinstance(config, Config)
        self._bits = reference.one_gpu(arena, build(reference.problem, config)) if ours else 0

    def prove(self) -> Verification:
        """Two calls one after the other, one for each parity of Y1, which is poisoned before."""

        def run() -> None:
            self._contestant.poison()
            self._gpus.sync()
            self._contestant.call(0)

        return min((self._verify(run) for _ in range(2)), key=lambda proof: proof.passed)

    def prove_in_flight(self) -> Verification:
        """The last of several calls that were enqueued together, as they are when timed."""

        def run() -> None:
            for which in BURST:
                self._contestant.call(which)

        return self._verify(run)

    def _verify(self, run: Callable[[], None]) -> Verification:
        contestant = self._contestant
        where = contestant.where
        proof = verify(
            self._gpus, self._reference, contestant.y2, run, where=where, bits=self._bits
        )
        contestant.check()
        return proof
