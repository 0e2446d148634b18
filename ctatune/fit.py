"""Fits the machine model to measured races: least squares of log errors, robust, with priors.

What is fitted: each rate of `models/*.json` that has a prior (what an experiment said of it, and
how sure that is), and an offset for each family of configs. A quarter of the shapes, chosen by
hash, takes no part, so that errors on them say what to expect elsewhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ctatune import baseline_latency
from ctatune.baseline_latency import modelled
from ctatune.config import AnyConfig, Baseline, Config
from ctatune.errors import UsageError
from ctatune.jit import kernel_hash
from ctatune.machine_model import MachineModel, family
from ctatune.problem import Problem
from ctatune.records import PROTOCOL, Prediction
from ctatune.rows import Row
from ctatune.simulate import simulate

HELD_OUT_PART = FOLDS = 4
OFFSET_LOG_SIGMA = 0.05  # of a family, before anything is known of it
NOISE_LOG_SIGMA = 0.03  # of a measured latency around a model of this form
QUANTILE, Z90 = 0.9, 1.645
SIZES = ("m", "k", "h", "n", "gpus")
_MOST = {"wave_softness": 1.0, "droop_fraction": 0.6}  # others may not exceed a peak rate


class Point(NamedTuple):
    """A measured latency."""

    problem: Problem
    config: AnyConfig
    latency_us: float


Predict = Callable[[Point, MachineModel], Prediction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Relative errors of a model on some points; `inside` is the part in its 90 % intervals, None
    for a model without."""

    points: int
    mape: float
    p90: float
    worst: float
    inside: float | None = None


def points(rows: Iterable[Row]) -> list[Point]:
    """The newest final of each config of this kernel and protocol; of a baseline method with a
    model its fastest variant."""
    newest: dict[tuple[Problem, AnyConfig], Row] = {}
    for row in sorted(rows, key=lambda row: row.age):
        final = row.measurement.phase == "final" and row.measurement.timed
        ours = isinstance(row.config, Config) and row.kernel_hash == kernel_hash()
        theirs = isinstance(row.config, Baseline) and _plain(row.config) in modelled(row.problem)
        if final and row.protocol == PROTOCOL and (ours or theirs):
            newest[row.problem, row.config] = row
    found: dict[tuple[Problem, AnyConfig], float] = {}
    for (problem, config), row in newest.items():
        key = problem, _plain(config) if isinstance(config, Baseline) else config
        found[key] = min(row.measurement.latency_us or math.inf, found.get(key, math.inf))
    return sorted(
        (Point(*key, latency_us) for key, latency_us in found.items()),
        key=lambda point: (point.problem.shape, point.problem.gpus, str(point.config)),
    )


def _plain(baseline: Baseline) -> Baseline:
    return replace(baseline, nccl="", graph=False)


def is_held_out(problem: Problem) -> bool:
    """Whether no fit may see the shape of a problem."""
    return _digit(problem.shape, 0) % HELD_OUT_PART == 0


def _digit(text: str, place: int) -> int:
    return hashlib.sha256(text.encode()).digest()[place]


def estimated(point: Point, machine: MachineModel) -> Prediction:
    """The first estimate of a point."""
    return baseline_latency.estimated(point.problem, point.config, machine)


def simulated(point: Point, machine: MachineModel) -> Prediction:
    """The simulator's, for points of our kernel."""
    assert isinstance(point.config, Config)
    return simulate(point.problem, point.config, machine)


def log_errors(
    some: Sequence[Point], machine: MachineModel, predict: Predict
) -> NDArray[np.float64]:
    """Logarithms of predicted over measured latency."""
    return np.array([math.log(predict(p, machine).latency_us / p.latency_us) for p in some])


def accuracy(some: Sequence[Point], machine: MachineModel, predict: Predict) -> Accuracy:
    """Errors of a model on some points, at least one."""
    predicted = [predict(point, machine) for point in some]
    errors = [
        abs(p.latency_us / point.latency_us - 1) for p, point in zip(predicted, some, strict=True)
    ]
    inside = [
        p.interval_us[0] <= point.latency_us <= p.interval_us[1]
        for p, point in zip(predicted, some, strict=True)
    ]
    return Accuracy(
        points=len(some),
        mape=float(np.mean(errors)),
        p90=float(np.quantile(errors, QUANTILE)),
        worst=max(errors),
        inside=float(np.mean(inside)),
    )


def prior_model(machine: MachineModel, document: dict[str, Any]) -> MachineModel:
    """The model before any fit: what experiments said of each rate, no offsets."""
    return replace(machine, offsets=(), **_priors(document)[0])


def _priors(document: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """The prior of each fitted rate and its log standard deviation."""
    fitted = {n: e for n, e in document["parameters"].items() if "prior" in e}
    return (
        {name: float(entry["prior"]) for name, entry in fitted.items()},
        {name: float(entry["prior_log_sigma"]) for name, entry in fitted.items()},
    )


def fitted(some: Sequence[Point], machine: MachineModel, document: dict[str, Any]) -> MachineModel:
    """`machine` with the rates and offsets that fit some points best, whatever it had before.

    Raises: UsageError when there are fewer points than rates.
    """
    priors, sigmas = _priors(document)
    names, families = list(priors), sorted({family(point.config) for point in some})
    if len(some) < len(names):
        raise UsageError(f"a fit needs at least {len(names)} measured configs, got {len(some)}")
    start = prior_model(machine, document)

    def model(steps: NDArray[np.float64]) -> MachineModel:
        """The model so many prior standard deviations away from the priors."""
        values = {
            n: priors[n] * math.exp(sigmas[n] * step)
            for n, step in zip(names, steps[: len(names)], strict=True)
        }
        limits = _MOST | {
            "tensor_tflops": machine.peak_tflops,
            "cublas_tflops": machine.peak_tflops,
            "hbm_gbps": machine.peak_hbm_gbps,
        }
        values |= {name: min(values[name], limits[name]) for name in limits.keys() & values.keys()}
        logs = OFFSET_LOG_SIGMA * steps[len(names) :]
        offsets = tuple(zip(families, map(float, logs), strict=True))
        return replace(start, **values, offsets=offsets)

    def residuals(steps: NDArray[np.float64]) -> NDArray[np.float64]:
        errors = log_errors(some, model(steps), estimated) / NOISE_LOG_SIGMA
        return np.concatenate([errors, steps])

    steps = np.zeros(len(names) + len(families))
    solution = least_squares(residuals, steps, loss="soft_l1", max_nfev=20, diff_step=1e-3)
    return model(solution.x)


def calibrated(
    some: Sequence[Point], machine: MachineModel, document: dict[str, Any]
) -> MachineModel:
    """Fitted to some points, with the log errors of shapes left out in turn as its doubt, and the
    sizes of the points as its range."""
    folds = [_digit(point.problem.shape, 1) % FOLDS for point in some]
    errors: dict[str, list[float]] = {"estimate": [], "simulator": []}
    for fold in sorted(set(folds)):
        kept = [point for point, own in zip(some, folds, strict=True) if own != fold]
        left = [point for point, own in zip(some, folds, strict=True) if own == fold]
        without = fitted(kept, machine, document)
        errors["estimate"] += list(log_errors(left, without, estimated))
        errors["simulator"] += list(log_errors(ours(left), without, simulated))
    doubts = {
        f"{name}_log_sigma": float(np.quantile(np.abs(values), QUANTILE)) / Z90
        for name, values in errors.items()
    }
    sizes = {name: [getattr(point.problem, name) for point in some] for name in SIZES}
    ranges = tuple((name, min(values), max(values)) for name, values in sizes.items())
    return replace(fitted(some, machine, document), **doubts, ranges=ranges)


def ours(some: Iterable[Point]) -> list[Point]:
    """The points of our kernel."""
    return [point for point in some if isinstance(point.config, Config)]


def written(document: dict[str, Any], machine: MachineModel) -> dict[str, Any]:
    """The model file with the values of a fitted machine, rounded."""
    parameters = {
        name: entry | {"value": float(f"{getattr(machine, name):.5g}")}
        for name, entry in document["parameters"].items()
    }
    return document | {
        "about": "Fitted by `ctatune fit`; `prior` is what the experiment in `source` said.",
        "parameters": parameters,
        "offsets": {name: round(log, 4) for name, log in machine.offsets},
        "ranges": {name: [low, high] for name, low, high in machine.ranges},
    }
