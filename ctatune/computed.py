"""Answers that nobody measured, by simulations or by the first estimate; and the ranked space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

from ctatune import latency
from ctatune.baseline_latency import modelled
from ctatune.config import AnyConfig, Baseline, Config
from ctatune.limits import why_invalid
from ctatune.machine_model import MachineModel
from ctatune.problem import Problem
from ctatune.records import Prediction, Source
from ctatune.rows import PredictionRow
from ctatune.simulate import SIMULATOR
from ctatune.space import answers, candidates

NEAR = 1.25  # of the best way: what the order of tiles and the pace may make of another one

_Predictions = Mapping[AnyConfig, Prediction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The config to run, what it takes, what baselines take, and what a person should know."""

    config: AnyConfig
    prediction: Prediction
    source: Source
    baselines: dict[str, float]
    notes: list[str]


def decide(
    problem: Problem,
    machine: MachineModel,
    predictions: Sequence[PredictionRow],
    failed: set[AnyConfig],
) -> Computed | None:
    """The fastest config by the user's simulations and, where it was not simulated, the first by
    the estimate, or a baseline that has a model and is faster; never one that failed. None when
    nothing of ours can run."""
    simulated = _simulated(problem, machine, predictions, failed)
    found = _estimated(problem, machine, failed) | simulated
    if not found:
        return None
    rivals: dict[AnyConfig, Prediction] = {
        baseline: latency.estimate(problem, baseline, machine) for baseline in modelled(problem)
    }
    every = found | rivals
    best = fastest(problem, every, failed)
    assert best is not None  # ours did not fail
    prediction = every[best]
    return Computed(
        config=best,
        prediction=prediction,
        source="simulated" if best in simulated else "predicted",
        baselines=of_baselines(rivals),
        notes=[
            f"computed by {prediction.model}, which knows no micro-batches",
            *machine.outside(problem, best),
        ],
    )


def fastest(
    problem: Problem, predictions: _Predictions, failed: set[AnyConfig]
) -> AnyConfig | None:
    """The fastest of those that may answer; of a method that failed in any variant none may."""
    lost = {c.method if isinstance(c, Baseline) else c for c in failed}
    able = [c for c in predictions if answers(c, problem.gpus) and not lost & {c, c.method}]
    return min(able, key=lambda config: predictions[config].latency_us, default=None)


def of_baselines(predictions: _Predictions) -> dict[str, float]:
    """Latencies of baselines by method, the slowest first."""
    found = [(p.latency_us, c.method) for c, p in predictions.items() if isinstance(c, Baseline)]
    return {method: latency_us for latency_us, method in sorted(found, reverse=True)}


def _simulated(
    problem: Problem, machine: MachineModel, rows: Sequence[PredictionRow], failed: set[AnyConfig]
) -> dict[AnyConfig, Prediction]:
    """What today's simulator said of such a machine and of configs that can run."""
    return {
        row.config: row.prediction
        for row in rows
        if isinstance(row.config, Config)
        and row.run.platform.name == machine.platform.name
        and row.prediction.model == SIMULATOR
        and row.config not in failed
        and row.good
        and why_invalid(row.config, problem, sm_count=machine.platform.sm_count) is None
    }


def _estimated(
    problem: Problem, machine: MachineModel, failed: set[AnyConfig]
) -> dict[AnyConfig, Prediction]:
    """The fastest config by the first estimate, of all valid ones that did not fail."""
    config = next((c for c in rank(problem, machine) if c not in failed), None)
    return {config: latency.estimate(problem, config, machine)} if config else {}


@lru_cache(maxsize=256)
def rank(problem: Problem, machine: MachineModel) -> tuple[Config, ...]:
    """All valid configs, the fastest by the first estimate first.

    A way to run (tiles, ring, mix, split) is first judged by one of its configs, and only those
    near the best one by all: the rest follows way by way. That is the order of tiles and the pace,
    and it saves two thirds of the time.
    """

    def estimated_us(config: Config) -> float:
        return latency.estimate(problem, config, machine).latency_us

    ways: dict[Config, list[Config]] = {}
    for config in candidates(problem, sm_count=machine.platform.sm_count):
        up, down = (replace(tile, group_m=1) for tile in config.tiles)
        ways.setdefault(replace(config, up=up, down=down, pace_us=0.0), []).append(config)
    by_way = [(estimated_us(own[len(own) // 2]), own) for own in ways.values()]
    judged = sorted(by_way, key=itemgetter(0))
    near = [config for us, own in judged if us <= NEAR * judged[0][0] for config in own]
    rest = [config for us, own in judged if us > NEAR * judged[0][0] for config in own]
    return *sorted(near, key=estimated_us), *rest
