"""The space ranked by a model, and the fastest config for a problem that nobody measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ctatune import latency
from ctatune.baseline_latency import modelled
from ctatune.config import AnyConfig, Baseline, Config
from ctatune.limits import why_invalid
from ctatune.machine_model import MachineModel
from ctatune.problem import Problem
from ctatune.records import Prediction
from ctatune.rows import PredictionRow
from ctatune.simulate import SIMULATOR
from ctatune.space import candidates


def fastest_simulated(
    problem: Problem, machine: MachineModel, rows: Sequence[PredictionRow], failed: set[AnyConfig]
) -> tuple[Config, Prediction] | None:
    """The fastest config in the user's database that the simulator of today saw."""
    pairs = [
        (row.config, row.prediction)
        for row in rows
        if isinstance(row.config, Config)
        and row.prediction.model == SIMULATOR
        and row.config not in failed
        and why_invalid(row.config, problem, sm_count=machine.platform.sm_count) is None
    ]
    return min(pairs, key=lambda pair: pair[1].latency_us, default=None)


def fastest_estimated(
    problem: Problem, machine: MachineModel, failed: set[AnyConfig]
) -> tuple[Config, Prediction] | None:
    """The fastest config by the first estimate, of all valid ones that did not fail."""
    config = next((c for c in rank(problem, machine) if c not in failed), None)
    return config and (config, latency.estimate(problem, config, machine))


def rivals(problem: Problem, machine: MachineModel) -> dict[Baseline, Prediction]:
    """The baselines that have a model, by the first estimate."""
    return {b: latency.estimate(problem, b, machine) for b in modelled(problem)}


@lru_cache(maxsize=256)
def rank(problem: Problem, machine: MachineModel) -> tuple[Config, ...]:
    """All valid configs, the fastest by the first estimate first."""
    found = candidates(problem, sm_count=machine.platform.sm_count)
    return tuple(sorted(found, key=lambda c: latency.estimate(problem, c, machine).latency_us))
