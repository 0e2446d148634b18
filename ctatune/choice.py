"""The answer: the fastest config known for a problem, and how. Imports no CUDA, no Optuna."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ctatune.baseline_latency import modelled
from ctatune.config import OWN_KERNEL, AnyConfig
from ctatune.errors import NoAnswer, UsageError
from ctatune.known import (
    alike,
    asked,
    differences,
    how_old,
    model_for,
    of_weights,
)
from ctatune.limits import why_invalid
from ctatune.problem import Output, Problem
from ctatune.records import Phase, Source
from ctatune.rows import PredictionRow, Row
from ctatune.seed import shipped
from ctatune.space import answers, candidates, default_config
from ctatune.stats import APART, ratio_interval, slower_in_each, verdict

# Our kernel first: its result is bit for bit that of one GPU, and a call is one launch a GPU.
TIE_ORDER = ("cta", "tp", "tp_twoshot", "microbatch", "microbatch_cta", "single")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The config to run for a problem. Latencies in microseconds a call.

    `source` says how `latency_us` and `baselines` are known; only `measured` ones were observed,
    those of a final all in the same run. `note` says what a person should know about the answer,
    `evidence` when and on what a measured one was observed.
    """

    shape: str
    dtype: str
    activation: str
    gpus: int
    output: Output
    platform: str
    method: str
    config: AnyConfig
    latency_us: float
    interval_us: tuple[float, float] | None
    source: Source
    verified: bool
    baselines: dict[str, float] = field(default_factory=dict)
    note: str = ""
    evidence: dict[str, str | int | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return asdict(self)


def choose(
    problem: Problem, db: Path | None, platform: str | None, *, ours: bool = False
) -> Choice:
    """The fastest config known for a problem, or the fastest of our kernel: measured, else by races
    of other numbers of tokens, else simulated, else estimated.

    `db` is the user's database (None: `default_path()`; no file: empty), the shipped measurements
    lie under it. Without `platform` it is the one with enough GPUs that the user measured last, or
    the shipped one.

    Raises: NoAnswer; StoreError for a damaged database.
    """
    user, wanted = asked(problem, db, platform)
    own, theirs = alike(user.of_tokens(problem.m), wanted), alike(shipped(problem.shape), wanted)
    failed = failed_in([*own, *theirs])
    no_kernel = _why_no_kernel(problem, [*own, *theirs], failed)
    barred = _baselines(problem, [*own, *theirs]) if ours else set()
    for phase in ("final", "screen"):
        for same, note in ((own, ""), (theirs, "from the shipped measurements")):
            if choice := _measured(problem, wanted, same, failed | barred, no_kernel, phase, note):
                return choice
    why = _why_not_measured(wanted, (*user.of_tokens(problem.m), *shipped(problem.shape)))
    near = of_weights(problem, user, wanted)
    failed |= {row.config for row in near if row.measurement.outcome == "wrong"}
    return _computed(problem, wanted, near, user.predictions, failed | barred, why)


def _baselines(problem: Problem, same: Sequence[Row]) -> set[AnyConfig]:
    """All that may not answer where one of our kernel is asked for."""
    measured = {row.config for row in same if row.config.method != "cta"}
    return measured | set[AnyConfig](modelled(problem))


def failed_in(same: Sequence[Row]) -> set[AnyConfig]:
    """Configs that were ever wrong, or whose newest row is a failure.

    A final that nobody finished (the measuring process was lost) says nothing about a config.
    """
    good = ("ok", "throttled")
    screened = [row for row in same if row.measurement.phase == "screen"]
    raced = [row for row in same if row.measurement.phase != "screen"]
    finished = {row.run.utc for row in raced if row.measurement.outcome in good}
    told = screened + [row for row in raced if row.run.utc in finished]
    newest = {row.config: row.measurement.outcome for row in sorted(told, key=lambda row: row.age)}
    wrong = {row.config for row in same if row.measurement.outcome == "wrong"}
    return wrong | {c for c, outcome in newest.items() if outcome not in good}


def _may_serve(row: Row) -> bool:
    """Whether a row of the right identity is an answer: well timed, and Y2 lies as asked."""
    return row.good and answers(row.config, row.problem.gpus)


def _latency_us(row: Row) -> float:
    return row.measurement.latency_us or math.inf


def _measured(
    problem: Problem,
    wanted: dict[str, Any],
    same: Sequence[Row],
    failed: set[AnyConfig],
    no_kernel: str | None,
    phase: Phase,
    origin: str,
) -> Choice | None:
    """The fastest of the newest finals, or of all screenings; never a config that failed.

    Finals ran interleaved, so those of different runs are not compared. Screenings are only a
    first look: the best one of all runs. Baselines answer only where our kernel was timed beside
    them, or cannot be for the reason `no_kernel`.
    """
    timed = [row for row in same if row.measurement.phase == phase and row.good]
    able = [row for row in timed if _may_serve(row) and row.config not in failed]
    ours = [row for row in able if row.config.method == "cta"]
    if not (ours or (able and no_kernel)):
        return None
    if phase == "final":
        newest = max(ours or able, key=lambda row: row.age).run
        able = [row for row in able if row.run == newest]
        timed = [row for row in timed if row.run == newest]
    won, tied = _winner(able)
    notes = ["screened, not raced"] if phase == "screen" else []
    if won.platform.name != wanted["platform"]:
        notes.append(f"measured on {won.platform.name}, whose GPU is the same")
    if old := how_old([won]):
        notes.append(f"measured{old}")
    if no_kernel:
        notes.append(no_kernel)
    elif tied:
        notes.append(f"a tie with {', '.join(tied)}")
    elif won.config.method != "cta":
        notes.append(f"run {won.config}: our kernel is slower here")
    rivals = sorted((row for row in timed if row.config.method != "cta"), key=_latency_us)
    return _choice(
        problem,
        wanted,
        won.config,
        latency_us=_latency_us(won),
        interval_us=won.measurement.interval_us,
        source="measured",
        verified=True,
        baselines={row.config.method: _latency_us(row) for row in reversed(rivals)},
        notes=[*notes, origin],
        evidence=_evidence(won),
    )


def _evidence(row: Row) -> dict[str, str | int | None]:
    platform, measured = row.platform, row.measurement
    return {
        "phase": measured.phase,
        "utc": row.run.utc,
        "rounds": len(measured.samples_us),
        "protocol": row.protocol,
        "kernel": row.kernel_hash if row.config.method in OWN_KERNEL else None,
        "gpu": platform.gpu,
        "link": platform.link,
        "driver": platform.driver,
        "power_limit_w": platform.power_limit_w,
    }


def _why_no_kernel(problem: Problem, same: Sequence[Row], failed: set[AnyConfig]) -> str | None:
    """Why our kernel cannot be compared with baselines, or None."""
    tried = {row.config for row in same if row.config.method == "cta" and row.kernel_hash}
    if tried:
        return "our kernel failed in every config that was tried" if tried <= failed else None
    runs = next(candidates(problem), None) is not None
    return None if runs else "our kernel cannot run this"


def _winner(able: Sequence[Row]) -> tuple[Row, list[str]]:
    """The fastest row, or of finals that tie with it the first method of TIE_ORDER; and who ties.

    What a tie is says `stats.verdict`, of the ratio over the interleaved rounds.
    """
    fastest = min(able, key=_latency_us)
    equal = [fastest]
    for row in able:
        if row.config.method == fastest.config.method or row.measurement.phase != "final":
            continue
        ours, best_of_all = (r.measurement.samples_us for r in (row, fastest))
        if len(ours) != len(best_of_all) or slower_in_each(ours, best_of_all):
            continue
        if verdict(*ratio_interval(ours, best_of_all)) == "tie":
            equal.append(row)
    won = min(equal, key=lambda row: (TIE_ORDER.index(row.config.method), _latency_us(row)))
    others = {str(row.config) for row in equal if row.config.method != won.config.method}
    return won, sorted(others)


def _why_not_measured(wanted: dict[str, Any], rows: Sequence[Row]) -> str:
    """Names what keeps the row that comes nearest from serving."""
    ours = [row for row in reversed(rows) if row.config.method == "cta"]
    if ours and all(row.measurement.phase == "control" for row in ours):
        return "only second runs (A/A controls) of our kernel are measured"
    if not ours:
        return "only baselines are measured" if rows else "this shape is not measured"
    nearest = min(ours, key=lambda row: (len(differences(row, wanted)), not _may_serve(row)))
    if unequal := differences(nearest, wanted):
        return f"measured rows exist but {' and '.join(unequal)}"
    if _may_serve(nearest):
        return "measured rows exist but their config failed in another trial"
    outcome = nearest.measurement.outcome
    fault = "not verified or not timed" if outcome == "ok" else f"their outcome is {outcome}"
    return f"measured rows exist but {fault}"


def _computed(
    problem: Problem,
    wanted: dict[str, Any],
    near: Sequence[Row],
    predictions: Sequence[PredictionRow],
    failed: set[AnyConfig],
    why: str,
) -> Choice:
    """What the nearest measured numbers of tokens say, else simulations, else the estimate."""
    from ctatune import computed, neighbours  # late: they import NumPy

    try:
        machine, borrowed = model_for(problem, wanted)
    except UsageError as error:
        raise NoAnswer(f"{why}; nothing can be computed: {error}") from error
    found = neighbours.decide(problem, near, machine, failed)
    found = found or computed.decide(problem, machine, predictions, failed)
    if found is None:
        reason = why_invalid(default_config(problem), problem, sm_count=machine.platform.sm_count)
        raise NoAnswer(f"no config can run {problem.shape}: {reason or 'each one failed'}")
    return _choice(
        problem,
        wanted,
        found.config,
        latency_us=found.prediction.latency_us,
        interval_us=found.prediction.interval_us,
        source=found.source,
        verified=False,
        baselines=found.baselines,
        notes=[why, *found.notes, borrowed],
    )


def _choice(
    problem: Problem,
    wanted: dict[str, Any],
    config: AnyConfig,
    *,
    latency_us: float,
    baselines: dict[str, float],
    notes: Sequence[str],
    **rest: Any,
) -> Choice:
    names = "dtype", "activation", "gpus", "output", "platform"
    alone = problem.gpus > 1 and baselines.get("single", math.inf) < latency_us * math.exp(-APART)
    return Choice(
        **{name: wanted[name] for name in names},
        shape=problem.shape,
        method=config.method,
        config=config,
        latency_us=latency_us,
        baselines=baselines,
        note="; ".join(filter(None, [*notes, "one GPU alone is faster" if alone else ""])),
        **rest,
    )
