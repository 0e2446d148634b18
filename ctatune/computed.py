"""The fastest config by a model, for a problem that nobody measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ctatune import latency
from ctatune.config import AnyConfig, Config
from ctatune.machine_model import MachineModel
from ctatune.problem import Problem
from ctatune.records import Prediction
from ctatune.rows import PredictionRow
from ctatune.space import candidates, why_invalid


def simulated(
    problem: Problem, machine: MachineModel, rows: Sequence[PredictionRow], failed: set[AnyConfig]
) -> tuple[Config, Prediction] | None:
    """The fastest config that the newest simulator in the user's database saw."""
    pairs = [
        (row.config, row.prediction)
        for row in rows
        if isinstance(row.config, Config)
        and row.prediction.model.startswith("simulator")
        and row.config not in failed
        and why_invalid(row.config, problem, sm_count=machine.platform.sm_count) is None
    ]
    newest = [pair for pair in pairs if pair[1].model == pairs[-1][1].model]
    return min(newest, key=lambda pair: pair[1].latency_us, default=None)


@lru_cache(maxsize=256)
def estimated(
    problem: Problem, machine: MachineModel, failed: frozenset[AnyConfig]
) -> tuple[Config, Prediction] | None:
    """The fastest config by the first estimate, of all valid ones that did not fail."""
    configs = candidates(problem, sm_count=machine.platform.sm_count)
    pairs = ((c, latency.estimate(problem, c, machine)) for c in configs if c not in failed)
    return min(pairs, key=lambda pair: pair[1].latency_us, default=None)
