"""An answer for tokens that nobody measured, from races of the same weights with more and fewer.

The estimate's error on a config, or on a method, changes slowly with the number of tokens: what it
was in the races beside corrects it here, in proportion to the distance in log m. Only what raced
there is looked at, and the default: to the estimate's favourites its errors would be the winners.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ctatune import race
from ctatune.baseline_latency import modelled, plain
from ctatune.computed import Computed, fastest, of_baselines
from ctatune.config import AnyConfig, Config
from ctatune.known import how_old
from ctatune.latency import estimate, predicted
from ctatune.limits import why_invalid
from ctatune.machine_model import MachineModel
from ctatune.problem import Problem
from ctatune.records import Prediction
from ctatune.rows import Row
from ctatune.space import default_config, fitted

FARTHEST = 2.0  # factor in tokens from a race without one near on the other side
WIDEST = 4.0  # factor in tokens between the races on both sides

_Logs = dict[AnyConfig, float]  # log of measured over estimated latency


def decide(
    problem: Problem, rows: Sequence[Row], machine: MachineModel, failed: set[AnyConfig]
) -> Computed | None:
    """The fastest by its corrected estimate of what raced beside a problem, and of the default,
    which is corrected like the fastest of ours; None without races of ours.

    `rows` have the identity that is wanted, and any number of tokens.
    """
    tokens = _beside(problem.m, {row.problem.m for row in rows if row.is_final_of_ours})
    races = {m: _race([row for row in rows if row.problem.m == m]) for m in tokens}
    logs = {m: _log_errors(found, machine, problem.m) for m, found in races.items() if found}
    ours = {m: log for m, found in logs.items() if (log := _of_ours(found)) is not None}
    if not ours:
        return None
    raced = {config for found in logs.values() for config in found}
    corrected: dict[AnyConfig, Prediction] = {}
    for config in raced | {default_config(problem)}:
        if isinstance(config, Config) and why_invalid(
            config, problem, sm_count=machine.platform.sm_count
        ):
            continue
        known = {m: found[config] for m, found in logs.items() if config in found}
        log = _between(problem.m, known or ours)
        latency_us = estimate(problem, config, machine).latency_us * math.exp(log)
        corrected[config] = predicted(problem, config, latency_us, machine)
    best = fastest(problem, corrected, failed)
    if best is None:
        return None
    races_of = " and ".join(map(str, tokens))
    old = how_old(row for found in races.values() for row in found)
    return Computed(
        config=best,
        prediction=corrected[best],
        source="neighbour",
        baselines=of_baselines(corrected),
        notes=[
            f"the estimate, corrected by the races of {races_of} tokens{old}",
            *machine.outside(problem, best),
        ],
    )


def _beside(m: int, measured: set[int]) -> list[int]:
    """The nearest numbers of tokens on both sides: a pair that is close enough to interpolate, else
    those that are near."""
    below = max((other for other in measured if other < m), default=0)
    above = min((other for other in measured if other > m), default=0)
    if below and above and above / below <= WIDEST:
        return [below, above]
    return [other for other in (below, above) if other and max(other / m, m / other) <= FARTHEST]


def _race(rows: Sequence[Row]) -> list[Row]:
    """The newest race in which ours ran."""
    ran = [(row.run.utc, row.run.id) for row in rows if row.is_final_of_ours]
    return race.newest([row for row in rows if row.good and (row.run.utc, row.run.id) in ran])


def _log_errors(found: Sequence[Row], machine: MachineModel, m: int) -> _Logs:
    """Of each config of a race, as it fits m tokens, and of the fastest variant of each baseline
    with a model, the fastest first."""
    logs: _Logs = {}
    for row in sorted(found, key=lambda row: row.measurement.latency_us or math.inf):
        config = plain(row.config)
        if isinstance(config, Config) or config in modelled(row.problem):
            expected_us = estimate(row.problem, config, machine).latency_us
            log = math.log((row.measurement.latency_us or math.inf) / expected_us)
            if isinstance(config, Config):
                config = fitted(config, row.problem.m, m)
            logs.setdefault(config, log)
    return logs


def _of_ours(logs: _Logs) -> float | None:
    """The error on the fastest of our configs."""
    return next((log for config, log in logs.items() if isinstance(config, Config)), None)


def _between(m: int, known: dict[int, float]) -> float:
    """Linear in log m between two numbers of tokens; that of the only one."""
    if len(known) == 1:
        return next(iter(known.values()))
    (low, at_low), (high, at_high) = sorted(known.items())
    part = math.log(m / low) / math.log(high / low)
    return at_low + part * (at_high - at_low)
