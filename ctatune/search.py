"""Looks for the fastest config: by measuring on GPUs, or by the simulator where there are none.

Order: the baselines, the default and a pure pipeline, the best of a first estimate (one of each
family), then what Optuna asks for; at last the finalists against each other, interleaved, two of
them twice (A/A control).
Each trial is stored before the next one starts, and what is stored is not tried again.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ctatune import latency, space
from ctatune.baseline_latency import modelled
from ctatune.computed import rank
from ctatune.config import OWN_KERNEL, AnyConfig, Baseline, Config
from ctatune.known import is_older, of_this_kernel
from ctatune.machine_model import MachineModel
from ctatune.problem import Problem
from ctatune.proposals import Proposals
from ctatune.records import Measurement
from ctatune.rows import Row
from ctatune.simulate import SIMULATOR, simulate
from ctatune.store import Store
from ctatune.worker import Worker

_log = logging.getLogger(__name__)

FIRST_BY_ESTIMATE = 16
FINALISTS = 4
RETRYABLE = ("throttled", "timeout", "launch_error")  # may be the machine's fault: tried again
TRIES = 2
FINAL_MARGIN = 1.05  # screened within this factor of the best one


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a search tells its caller after each trial. `latency_us` is None for a failed one."""

    done: int
    goal: int
    config: AnyConfig
    latency_us: float | None
    detail: str
    best_us: float | None


Report = Callable[[Step], None]
Known = dict[AnyConfig, float | None]  # latency of what was tried; None: it failed


class Hardware:
    """Measures in a worker and stores each row, which is verified before it is timed."""

    def __init__(
        self, problem: Problem, store: Store, run_id: int, worker: Worker, machine: MachineModel
    ) -> None:
        self._problem, self._store, self._run_id = problem, store, run_id
        self._worker, self._machine = worker, machine
        # One seed a search: all its trials are compared with one reference (measure.Bench).
        self._seed = random.SystemRandom().randrange(1 << 30)

    def known(self) -> Known:
        """What the store holds already."""
        found: Known = {}
        bad_luck: Counter[AnyConfig] = Counter()
        for row in self._rows():
            config, outcome = row.config, row.measurement.outcome
            if row.measurement.phase != "screen" or outcome == "invalid":
                continue
            bad_luck[config] += outcome in RETRYABLE
            if outcome not in RETRYABLE or bad_luck[config] == TRIES:
                found[config] = row.measurement.latency_us if outcome == "ok" else None
        return found

    def raced(self) -> bool:
        """Whether finalists, ours among them, were compared since the last good trial."""
        finals: list[Row] = []
        for row in self._rows():
            if row.measurement.phase == "final":
                finals.append(row)
            elif row.measurement.phase == "screen" and row.measurement.outcome == "ok":
                finals.clear()
        return any(
            row.run_id == finals[-1].run_id
            and row.config.method == "cta"
            and row.measurement.outcome == "ok"
            for row in finals
        )

    def _rows(self) -> list[Row]:
        """The rows of this machine, problem, kernel and protocol, the oldest first."""
        rows = self._store.measurements(self._problem, self._worker.platform.name)
        return [
            row
            for row in sorted(rows, key=lambda row: row.age)
            if row.run.platform == self._worker.platform
            and row.of_this_protocol
            and (row.config.method not in OWN_KERNEL or of_this_kernel(row))
            and (row.good or not is_older(row))  # what an older kernel failed at is tried again
        ]

    def trial(self, config: AnyConfig) -> tuple[float | None, str]:
        """Latency of one config, or None and the reason."""
        measured = self._worker.trial(self._problem, config, self._seed)
        if measured.outcome == "invalid":  # it did not run: this machine may lack a library, today
            return None, measured.detail
        measured = self._keep(config, measured)
        return (measured.latency_us if measured.outcome == "ok" else None), measured.detail

    def finals(self, configs: Sequence[AnyConfig], controls: Sequence[AnyConfig]) -> None:
        """Compare the finalists with each other; `controls` are those that run twice (A/A)."""
        entries = [*configs, *controls]
        rows = self._worker.finals(self._problem, entries, self._seed)
        with self._store.transaction():
            for i, (config, measured) in enumerate(zip(entries, rows, strict=True)):
                second = i >= len(configs)
                self._keep(config, replace(measured, phase="control") if second else measured)

    def _keep(self, config: AnyConfig, measured: Measurement) -> Measurement:
        gpus = 1 if config.method == "single" else self._problem.gpus
        bound_us = self._machine.roofline_us(self._problem, gpus)
        if measured.outcome == "ok" and (measured.latency_us or 0.0) < bound_us:
            detail = f"timing fault: {measured.latency_us} us, the roofline is {bound_us:.1f} us"
            measured = replace(measured, outcome="wrong", detail=detail)
        self._store.add_measurement(self._run_id, self._problem, config, measured)
        return measured


class Simulated:
    """The same by the discrete-event simulator; stores predictions, never measurements."""

    def __init__(self, problem: Problem, store: Store, run_id: int, machine: MachineModel) -> None:
        self._problem, self._store, self._run_id = problem, store, run_id
        self._machine = machine

    def known(self) -> Known:
        rows = self._store.predictions(self._problem, self._machine.platform.name)
        return {
            row.config: row.prediction.latency_us
            for row in rows
            if row.good and row.prediction.model in (SIMULATOR, latency.ESTIMATE)
        }

    def raced(self) -> bool:
        return True  # it has no noise: its screening is final

    def trial(self, config: AnyConfig) -> tuple[float | None, str]:
        if isinstance(config, Config):
            predicted = simulate(self._problem, config, self._machine)
        elif config in modelled(self._problem):
            predicted = latency.estimate(self._problem, config, self._machine)
        else:
            return None, "no model of it"
        self._store.add_prediction(self._run_id, self._problem, config, predicted)
        return predicted.latency_us, ""

    def finals(self, configs: Sequence[AnyConfig], controls: Sequence[AnyConfig]) -> None:
        """Nothing to compare: see `raced`."""


Judge = Hardware | Simulated  # where latencies come from


def search(
    problem: Problem,
    judge: Judge,
    machine: MachineModel,
    report: Report,
    *,
    trials: int,
    seconds: float | None = None,
    race: bool = False,
) -> int:
    """Try configs until `trials` are stored for this problem (earlier runs count) or time is up;
    the defaults in any case.

    The finalists race when a trial was made, of ours or of a baseline, now or since the last race,
    or when `race` asks.

    Returns the number of trials made now. `KeyboardInterrupt` may end it at any moment; what was
    reported is stored.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    ranked = rank(problem, machine)
    if not ranked:
        return 0
    known = judge.known()
    latencies = [known[config] for config in ranked if config in known]
    tried, best_us = len(latencies), _fastest(latencies)
    made = 0
    new_baselines = _try_baselines(problem, judge, known, end)
    proposals, always = Proposals(ranked, known), space.defaults(problem)
    for config in _order(problem, ranked, proposals):
        enough = tried + made >= trials and config not in always
        if enough or time.monotonic() > end:
            break
        if config in known:
            continue
        value, detail = judge.trial(config)
        known[config] = value
        proposals.tell(config, value)
        made += 1
        best_us = _fastest([best_us, value])
        report(
            Step(
                done=tried + made,
                goal=trials,
                config=config,
                latency_us=value,
                detail=detail,
                best_us=best_us,
            )
        )
    finalists = _finalists(problem, ranked, known)
    if finalists and (made or new_baselines or race or not judge.raced()):
        judge.finals(finalists, _controls(problem, finalists, known))
    return made


def _try_baselines(problem: Problem, judge: Judge, known: Known, end: float) -> int:
    """Try those that are not known and add them to `known`; returns how many were timed."""
    timed = 0
    missing: dict[str, list[str]] = {}
    for baseline in space.baselines(problem):
        if baseline not in known and time.monotonic() < end:
            known[baseline], detail = judge.trial(baseline)
            timed += known[baseline] is not None
            if known[baseline] is None:
                missing.setdefault(detail, []).append(str(baseline))
    for detail, names in missing.items():
        _log.warning("not in the race (%s): %s", detail, ", ".join(names))
    return timed


def _fastest(latencies: Sequence[float | None]) -> float | None:
    return min((us for us in latencies if us is not None), default=None)


def _order(problem: Problem, ranked: Sequence[Config], proposals: Proposals) -> Iterator[Config]:
    yield from first(problem, ranked)
    yield from proposals
    yield from ranked  # where Optuna finds nothing new


def first(problem: Problem, ranked: Sequence[Config]) -> list[Config]:
    """What a search tries before it asks Optuna, whatever it measures."""
    return list(dict.fromkeys([*space.defaults(problem), *_diverse(ranked)]))


def _diverse(ranked: Sequence[Config]) -> list[Config]:
    """The best by estimate, one of each family: the estimate hardly sees the order of tiles."""
    families: dict[tuple[object, ...], Config] = {}
    for config in ranked:
        tiles = tuple(replace(tile, group_m=1) for tile in config.tiles)
        ring = config.stages, config.d_slabs
        kind = config.multicast, config.direct, config.swap_ab, config.down_axis
        families.setdefault((tiles, ring, kind), config)
    return list(families.values())[:FIRST_BY_ESTIMATE]


def _finalists(problem: Problem, ranked: Sequence[Config], known: Known) -> list[AnyConfig]:
    """The best screened configs, and what always races: defaults and baselines."""
    screened = _by_latency(ranked, known)
    if not screened:
        return []
    limit_us = FINAL_MARGIN * screened[0][0]
    chosen = [config for us, config in screened[:FINALISTS] if us <= limit_us]
    always = _by_latency(space.defaults(problem), known)
    chosen += [config for _, config in always if config not in chosen]
    best_of_method: dict[str, AnyConfig] = {}
    for _, baseline in _by_latency(space.baselines(problem), known):
        best_of_method.setdefault(baseline.method, baseline)
    return [*chosen, *best_of_method.values()]


def _controls(problem: Problem, finalists: Sequence[AnyConfig], known: Known) -> list[AnyConfig]:
    """Who runs twice: the best of ours, and the best baseline that may be the answer."""
    able = [c for c in finalists if space.answers(c, problem.gpus)]
    ours = _by_latency([c for c in able if isinstance(c, Config)], known)[:1]
    theirs = _by_latency([c for c in able if isinstance(c, Baseline)], known)[:1]
    return [config for _, config in (*ours, *theirs)]


def _by_latency(configs: Sequence[AnyConfig], known: Known) -> list[tuple[float, AnyConfig]]:
    """Latency and config of those that were measured well, the fastest first."""
    pairs = [(us, c) for c in configs if (us := known.get(c)) is not None]
    return sorted(pairs, key=lambda pair: pair[0])
