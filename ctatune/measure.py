"""Measures configs on hardware: verified first, then timed by the protocol of DESIGN 6.

Runs in the process that owns the GPUs (`worker.py` starts it as a child of a search).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ctatune import baselines
from ctatune.config import AnyConfig, Config
from ctatune.errors import PipelineTimeoutError
from ctatune.gpus import Arena, Gpus
from ctatune.jit import CompileError
from ctatune.launch import Mlp
from ctatune.operands import Inputs, cold_sets, elements_read, place
from ctatune.problem import Problem
from ctatune.records import KernelBuild, Measurement, Outcome, Platform, Verification
from ctatune.schedule import Columns, build
from ctatune.space import why_invalid
from ctatune.stats import median_interval
from ctatune.telemetry import Telemetry
from ctatune.timing import Chain, Timer
from ctatune.verify import Reference, promised, verify

SCREEN_ROUNDS = 5
MIN_ROUNDS, MAX_ROUNDS, FINAL_SECONDS = 12, 60, 20.0
TIE = 0.005  # half-width of the interval of the log-ratio at which two methods are told apart
APART = 0.01
RELOAD_SECONDS = 0.1  # of load before each round of a final, so that clocks stay settled


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A method ready to be called on the GPUs, with what verification needs to know of it."""

    config: AnyConfig
    call: Callable[[int], None]
    check: Callable[[], None]
    poison: Callable[[], None]
    y2: dict[int, int]
    where: list[tuple[int, Columns]]
    kernel: KernelBuild | None


class Bench:
    """The GPUs of this process, ready to measure problems of up to as many GPUs."""

    def __init__(self, gpus: int) -> None:
        self._telemetry = Telemetry(gpus)
        self.gpus = Gpus(gpus)
        self._libraries = baselines.Libraries(self.gpus)

    def platform(self) -> Platform:
        """The identity of this machine."""
        return self._telemetry.platform(sm_count=self.gpus.sm_count, l2_bytes=self.gpus.l2_bytes)

    def trial(self, problem: Problem, config: AnyConfig, seed: int) -> Measurement:
        """Verify and time one config: SCREEN_ROUNDS rounds. Never raises for a bad config."""
        reason = self._why_not(problem, config)
        if reason:
            return Measurement(outcome="invalid", detail=reason)
        try:
            with self.gpus.arena() as arena:
                return self._screen(arena, problem, config, seed)
        except CompileError as error:
            return Measurement(outcome="compile_error", detail=str(error))
        except PipelineTimeoutError as error:
            return Measurement(outcome="timeout", detail=str(error))

    def _why_not(self, problem: Problem, config: AnyConfig) -> str | None:
        if isinstance(config, Config):
            return why_invalid(config, problem, sm_count=self.gpus.sm_count)
        return baselines.why_not(config, problem)

    def _screen(self, arena: Arena, problem: Problem, config: AnyConfig, seed: int) -> Measurement:
        contestant, proof = self._verified(arena, problem, config, seed)
        if not proof.passed:
            return _wrong(contestant, proof)
        timer = Timer(self.gpus, arena)
        calls = timer.calls_for(contestant.call)
        timer.load(contestant.call, calls)
        before = self._telemetry.read()
        rounds = [timer.chain(contestant.call, calls) for _ in range(SCREEN_ROUNDS)]
        after = self._telemetry.read()
        single = timer.single_shot_us(contestant.call)
        contestant.check()
        base = Measurement(
            outcome="ok",
            single_shot_us=single,
            verification=proof,
            kernel=contestant.kernel,
            gpu_state=self._telemetry.state(before, after, calls=calls),
        )
        return _with_rounds(base, rounds)

    def finals(
        self, problem: Problem, configs: Sequence[AnyConfig], seed: int
    ) -> list[Measurement]:
        """Time configs against each other, interleaved in random order, until told apart.

        Every config is verified anew. A config that fails takes no part; its row says why.
        """
        with self.gpus.arena() as arena:
            field: dict[int, tuple[Contestant, Verification]] = {}
            results: dict[int, Measurement] = {}
            for i, config in enumerate(configs):
                contestant, proof = self._verified(arena, problem, config, seed)
                if proof.passed:
                    field[i] = (contestant, proof)
                else:
                    results[i] = replace(_wrong(contestant, proof), phase="final")
            timer = Timer(self.gpus, arena)
            before = self._telemetry.read()
            rounds = _race(timer, {i: c for i, (c, _) in field.items()}, seed)
            after = self._telemetry.read()
            for i, (contestant, proof) in field.items():
                contestant.check()
                base = Measurement(
                    outcome="ok",
                    phase="final",
                    verification=proof,
                    kernel=contestant.kernel,
                    gpu_state=self._telemetry.state(before, after),
                )
                results[i] = _with_rounds(base, rounds[i])
        return [results[i] for i in range(len(configs))]

    def _verified(
        self, arena: Arena, problem: Problem, config: AnyConfig, seed: int
    ) -> tuple[Contestant, Verification]:
        contestant = self._contestant(arena, problem, config, seed)
        return contestant, self.prove(problem, contestant, seed)

    def prove(self, problem: Problem, contestant: Contestant, seed: int) -> Verification:
        """Check two calls in a row (both parities of Y1) against the reference; the worse one."""
        with self.gpus.arena() as arena:
            reference = Reference(self.gpus, arena, problem, seed)
            config = contestant.config
            bits = reference.one_gpu(build(problem, config)) if isinstance(config, Config) else 0

            def run() -> None:
                contestant.poison()
                self.gpus.sync()
                contestant.call(0)

            proofs = [
                verify(self.gpus, reference, contestant.y2, run, where=contestant.where, bits=bits)
                for _ in range(2)
            ]
            contestant.check()
        return min(proofs, key=lambda proof: proof.passed)

    def proves(self, problem: Problem, config: Config, *, skip_wait: bool = False) -> bool:
        """Whether a config verifies; with `skip_wait` as the negative control, which must not."""
        seed = 1
        with self.gpus.arena() as arena:
            inputs = Inputs(self.gpus, arena, problem, seed)
            contestant = self.cta(arena, problem, config, inputs, skip_wait=skip_wait)
            return self.prove(problem, contestant, seed).passed

    def _contestant(
        self, arena: Arena, problem: Problem, config: AnyConfig, seed: int
    ) -> Contestant:
        inputs = Inputs(self.gpus, arena, problem, seed)
        if isinstance(config, Config):
            return self.cta(arena, problem, config, inputs)
        method = baselines.prepare(config, self._libraries, arena, inputs)
        whole = Columns(0, problem.n)
        return Contestant(
            config=config,
            call=method.call,
            check=method.check,
            poison=lambda: None,
            y2=method.y2,
            where=[(gpu, whole) for gpu in method.y2],
            kernel=None,
        )

    def cta(
        self,
        arena: Arena,
        problem: Problem,
        config: Config,
        inputs: Inputs,
        *,
        skip_wait: bool = False,
    ) -> Contestant:
        """The CTA-pipelined kernel as a contestant."""
        schedule = build(problem, config)
        sets = place(inputs, schedule, cold_sets(self.gpus, elements_read(schedule)))
        mlp = Mlp(self.gpus, arena, schedule, sets, skip_wait=skip_wait)
        return Contestant(
            config=config,
            call=mlp.call,
            check=mlp.check,
            poison=mlp.poison,
            y2=dict(enumerate(sets[0].y2)),
            where=promised(schedule),
            kernel=mlp.build(),
        )


def _race(timer: Timer, field: dict[int, Contestant], seed: int) -> dict[int, list[Chain]]:
    """Rounds of all contestants in random order; ends when all are told from the best, or late."""
    order = np.random.default_rng(seed)
    calls = {i: timer.calls_for(c.call) for i, c in field.items()}
    rounds: dict[int, list[Chain]] = {i: [] for i in field}
    for i, contestant in field.items():
        timer.load(contestant.call, calls[i])
    end = time.monotonic() + FINAL_SECONDS
    for played in range(1, MAX_ROUNDS + 1):
        for i in order.permutation(list(field)):
            timer.load(field[i].call, calls[i], RELOAD_SECONDS)
            rounds[i].append(timer.chain(field[i].call, calls[i]))
        if played >= MIN_ROUNDS and (time.monotonic() > end or _told_apart(rounds)):
            break
    return rounds


def _told_apart(rounds: dict[int, list[Chain]]) -> bool:
    """Whether each contestant is clearly slower than the best one, or as good as equal to it."""
    times = {i: np.log([chain.latency_us for chain in chains]) for i, chains in rounds.items()}
    best = min(times, key=lambda i: float(np.median(times[i])))
    for i, values in times.items():
        _, low, high = median_interval(values - times[best])
        if i != best and low < APART and (high - low) / 2 > TIE:
            return False
    return True


def _with_rounds(base: Measurement, rounds: Sequence[Chain]) -> Measurement:
    samples = tuple(chain.latency_us for chain in rounds)
    floor = float(np.median([chain.floor_us for chain in rounds]))
    median, low, high = median_interval(list(samples))
    outcome: Outcome = "throttled" if base.gpu_state.get("marks") else "ok"
    if median <= 0 or not math.isfinite(median):
        outcome = "wrong"
    return replace(
        base,
        outcome=outcome,
        detail="; ".join(map(str, base.gpu_state.get("marks", []))),  # type: ignore[arg-type]
        latency_us=median,
        interval_us=(low, high),
        samples_us=samples,
        floor_us=floor,
    )


def _wrong(contestant: Contestant, proof: Verification) -> Measurement:
    detail = (
        f"relative error {proof.relative_error:.2e}, worst {proof.worst_error:.2e}, "
        f"{proof.nans} NaNs, bits equal to one GPU: {proof.bitwise_equal}"
    )
    return Measurement(outcome="wrong", detail=detail, verification=proof, kernel=contestant.kernel)
