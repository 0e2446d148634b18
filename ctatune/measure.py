"""Measures configs on hardware: verified first, then timed by the protocol of DESIGN 6.

Runs in the process that owns the GPUs (`worker.py` starts it as a child of a search).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ctatune import baselines
from ctatune.config import AnyConfig, Config
from ctatune.contestants import Contestant, Contestants
from ctatune.errors import DeviceError, PipelineTimeoutError
from ctatune.gpus import Arena, Gpus
from ctatune.jit import CompileError
from ctatune.limits import why_invalid
from ctatune.problem import Problem
from ctatune.records import Measurement, Outcome, Phase, Platform, Verification
from ctatune.rounds import MIN_ROUNDS, NEXT_LOAD_SECONDS, Rounds
from ctatune.stats import median_interval
from ctatune.telemetry import Telemetry
from ctatune.timing import Chain, Timer
from ctatune.verify import Prover, Reference

SCREEN_ROUNDS = 5


class Bench:
    """The GPUs of this process, ready to measure problems of up to as many GPUs.

    `ranks` of them share a GPU (see Gpus): for tests.
    """

    def __init__(self, gpus: int, *, ranks: int = 1) -> None:
        self.gpus = Gpus(gpus, ranks=ranks)
        self._telemetry = Telemetry(list(dict.fromkeys(d.uuid for d in self.gpus.devices)))
        self._contestants = Contestants(self.gpus)
        self._reference_arena = Arena(self.gpus)
        self._reference: Reference | None = None

    def platform(self) -> Platform:
        """The identity of this machine."""
        return self._telemetry.platform(sm_count=self.gpus.sm_count, l2_bytes=self.gpus.l2_bytes)

    def trial(self, problem: Problem, config: AnyConfig, seed: int) -> Measurement:
        """Verify and time one config: SCREEN_ROUNDS rounds. Never raises for a bad config."""
        return self._guarded("screen", lambda: self._screen(problem, config, seed))

    def _guarded(self, phase: Phase, measure: Callable[[], Measurement]) -> Measurement:
        try:
            return measure()
        except CompileError as error:
            return Measurement(outcome="compile_error", phase=phase, detail=str(error))
        except PipelineTimeoutError as error:
            return Measurement(outcome="timeout", phase=phase, detail=str(error))
        except DeviceError as error:  # out of memory, or a library that refuses
            self.gpus.sync()  # a broken context says so again, and the worker starts a new process
            return Measurement(outcome="launch_error", phase=phase, detail=str(error))

    def _reference_of(self, problem: Problem, seed: int) -> Reference:
        """The reference of a problem and seed: kept until another one is asked for.

        It takes seconds at many tokens, and all trials of a search share one.
        """
        kept = self._reference
        if kept is None or (kept.problem, kept.seed) != (problem, seed):
            self._reference = None
            self._reference_arena.close()
            kept = self._reference = Reference(self.gpus, self._reference_arena, problem, seed)
        return kept

    def _why_not(self, problem: Problem, config: AnyConfig) -> str | None:
        if isinstance(config, Config):
            return why_invalid(config, problem, sm_count=self.gpus.sm_count)
        return baselines.why_not(config, problem)

    def _screen(self, problem: Problem, config: AnyConfig, seed: int) -> Measurement:
        if reason := self._why_not(problem, config):
            return Measurement(outcome="invalid", detail=reason)
        with self.gpus.arena() as arena:
            reference = self._reference_of(problem, seed)
            contestant = self._contestants.prepare(arena, problem, config, seed)
            prover = Prover(self.gpus, arena, reference, contestant)
            proof = prover.prove()
            if not proof.passed:
                return _wrong(contestant, proof, "screen")
            timer = Timer(self.gpus, arena)
            calls = timer.calls_for(contestant.call, contestant.launches)
            timer.load(contestant.call, calls, NEXT_LOAD_SECONDS)
            before = self._telemetry.read()
            rounds = [timer.chain(contestant.call, calls) for _ in range(SCREEN_ROUNDS)]
            after = self._telemetry.read()
            single = timer.single_shot_us(contestant.call)
            in_flight = prover.prove_in_flight()
            if not in_flight.passed:
                return _wrong(contestant, in_flight, "screen")
        state = self._telemetry.state(before, after, calls=calls)
        return replace(_timed(contestant, proof, "screen", rounds, state), single_shot_us=single)

    def finals(
        self, problem: Problem, configs: Sequence[AnyConfig], seed: int
    ) -> list[Measurement]:
        """Time configs against each other, interleaved in random order, until told apart.

        Every config is verified anew. A config that fails takes no part; its row says why. One
        that is listed twice runs twice, each time with its own memory (A/A control).
        """
        reference = self._reference_of(problem, seed)
        with self.gpus.arena() as arena:
            field: dict[int, tuple[Contestant, Verification]] = {}
            results: dict[int, Measurement] = {}

            def enter(i: int, config: AnyConfig) -> Measurement:
                contestant = self._contestants.prepare(arena, problem, config, seed)
                with self.gpus.arena() as own:
                    proof = Prover(self.gpus, own, reference, contestant).prove()
                if proof.passed:
                    field[i] = (contestant, proof)
                return _wrong(contestant, proof, "final")

            for i, config in enumerate(configs):
                results[i] = self._guarded("final", lambda i=i, c=config: enter(i, c))
            if field:
                before = self._telemetry.read()
                timer = Timer(self.gpus, arena)
                contestants = {i: contestant for i, (contestant, _) in field.items()}
                rounds = Rounds(contestants, timer, self._telemetry, seed)
                rounds.run()
                state = self._telemetry.state(before, self._telemetry.read())
                for i, lost in rounds.lost.items():
                    results[i] = Measurement(outcome="timeout", phase="final", detail=lost)
                for i in field.keys() - rounds.lost.keys():
                    own = state | rounds.state(i)
                    results[i] = _timed(*field[i], "final", rounds.chains[i], own)
        return [results[i] for i in range(len(configs))]

    def proves(self, problem: Problem, config: Config, *, skip_wait: bool = False) -> bool:
        """Whether a config verifies, one call at a time and in flight.

        With `skip_wait` as the negative control, which must not.
        """
        reference = self._reference_of(problem, 1)
        with self.gpus.arena() as arena:
            contestant = self._contestants.prepare(arena, problem, config, 1, skip_wait=skip_wait)
            prover = Prover(self.gpus, arena, reference, contestant)
            return prover.prove().passed and prover.prove_in_flight().passed


def _timed(
    contestant: Contestant,
    proof: Verification,
    phase: Phase,
    rounds: Sequence[Chain],
    state: dict[str, object],
) -> Measurement:
    least = MIN_ROUNDS if phase == "final" else 1
    if len(rounds) < least:
        detail = f"GPUs were slowed down or shared: {len(rounds)} of {least} rounds are clean"
        return Measurement(outcome="throttled", phase=phase, detail=detail, gpu_state=state)
    samples = tuple(chain.latency_us for chain in rounds)
    floor = float(np.median([chain.floor_us for chain in rounds]))
    median, low, high = median_interval(list(samples))
    outcome: Outcome = "throttled" if state.get("marks") else "ok"
    detail = f"marked: {state['marks']}" if state.get("marks") else ""
    if not all(0 < sample < math.inf for sample in samples):
        outcome, detail = "wrong", f"timing fault: {min(samples)} us are left after the floor"
    return Measurement(
        outcome=outcome,
        phase=phase,
        detail=detail,
        latency_us=median,
        interval_us=(low, high),
        samples_us=samples,
        floor_us=floor,
        verification=proof,
        kernel=contestant.kernel,
        gpu_state=state,
    )


def _wrong(contestant: Contestant, proof: Verification, phase: Phase) -> Measurement:
    detail = (
        f"relative error {proof.relative_error:.2e}, worst {proof.worst_error:.2e}, "
        f"{proof.nans} NaNs, bits equal to one GPU: {proof.bitwise_equal}"
    )
    return Measurement(
        outcome="wrong",
        phase=phase,
        detail=detail,
        verification=proof,
        kernel=contestant.kernel,
    )
