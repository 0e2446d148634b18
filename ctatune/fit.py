"""Fits the machine model to measured latencies: least squares of log errors, robust, with priors.

What is fitted: each rate of `models/*.json` that has a prior (what an experiment said of it, and
how sure that is), and an offset for each family of configs. A quarter of the shapes, chosen by
hash, takes no part, so that errors on them say what to expect elsewhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ctatune.baseline_latency import modelled, plain
from ctatune.config import AnyConfig, Config
from ctatune.errors import UsageError
from ctatune.known import of_this_kernel
from ctatune.latency import estimate
from ctatune.limits import why_invalid
from ctatune.machine_model import Z90, MachineModel, family, model_of, tile_kind
from ctatune.problem import Problem
from ctatune.records import Prediction
from ctatune.rows import Row
from ctatune.simulate import simulate

HELD_OUT_PART = FOLDS = 4
SIMULATED = 3  # one of so many points is simulated for the doubt of the simulator
OFFSET_LOG_SIGMA = 0.05  # of a family, before anything is known of it
NOISE_LOG_SIGMA = 0.03  # of a measured latency around a model of this form
EVALUATIONS = 4  # the kinks of max() keep it from converging; 10 gain nothing
REFINEMENTS = 2  # evaluations when a fit begins near the end
_STEP = 0.02  # of a slope, in prior standard deviations
BASELINE_RATES = {
    *("cublas_tflops", "cublas_launch_us", "overlap_power"),
    *("nccl_us", "nccl_gbps", "two_shot_us", "two_shot_gbps"),
}
SIZES = ("m", "k", "h", "n", "gpus")
_MOST = {"power_exponent": 3.0}
_PEAKS = {
    "tensor_tflops": "peak_tflops",
    "cublas_tflops": "peak_tflops",
    "hbm_gbps": "peak_hbm_gbps",
}
# Sizes that a fit is judged beyond: fitted up to the limit, judged on two to four times as much.
LIMITS = (("m", 1024), ("k", 4096), ("h", 8192))


class Point(NamedTuple):
    """A measured latency."""

    problem: Problem
    config: AnyConfig
    latency_us: float


Predict = Callable[[Problem, Any, MachineModel], Prediction]  # `estimate` or `simulate`


def points(rows: Iterable[Row]) -> list[Point]:
    """The newest screening of each config of this kernel and protocol; of a baseline method with a
    model its fastest variant. Races have another load, that of all contestants, so are left out."""
    newest: dict[tuple[Problem, AnyConfig], Row] = {}
    for row in sorted(rows, key=lambda row: row.age):
        good = row.good and row.measurement.phase == "screen" and row.of_this_protocol
        of_ours = (
            isinstance(row.config, Config)
            and of_this_kernel(row)
            and why_invalid(row.config, row.problem) is None  # a file may be edited by hand
        )
        has_model = plain(row.config) in modelled(row.problem)
        if good and (of_ours or has_model):
            newest[row.problem, row.config] = row
    found: dict[tuple[Problem, AnyConfig], float] = {}
    for (problem, config), row in newest.items():
        key = problem, plain(config)
        found[key] = min(row.measurement.latency_us or math.inf, found.get(key, math.inf))
    return sorted(
        (Point(*key, latency_us) for key, latency_us in found.items()),
        key=lambda point: (point.problem.shape, point.problem.gpus, str(point.config)),
    )


def ours(some: Iterable[Point]) -> list[Point]:
    """The points of our kernel."""
    return [point for point in some if isinstance(point.config, Config)]


def is_held_out(problem: Problem) -> bool:
    """Whether no fit may see the shape of a problem."""
    return _digit(problem.shape, 0) % HELD_OUT_PART == 0


def _digit(text: str, place: int) -> int:
    return hashlib.sha256(text.encode()).digest()[place]


def log_errors(
    some: Sequence[Point], machine: MachineModel, predict: Predict
) -> NDArray[np.float64]:
    """Logarithms of predicted over measured latency."""
    predicted_us = [predict(p.problem, p.config, machine).latency_us for p in some]
    return np.log(predicted_us) - np.log([point.latency_us for point in some])


def _priors(document: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """The prior of each fitted rate and its log standard deviation."""
    fitted = {n: e for n, e in document["parameters"].items() if "prior" in e}
    return (
        {name: float(entry["prior"]) for name, entry in fitted.items()},
        {name: float(entry["prior_log_sigma"]) for name, entry in fitted.items()},
    )


def prior_model(document: dict[str, Any]) -> MachineModel:
    """The model before any fit: what experiments said of each rate, no offsets."""
    return replace(model_of(document), offsets=(), **_priors(document)[0])


def fitted(
    some: Sequence[Point], document: dict[str, Any], near: MachineModel | None = None
) -> MachineModel:
    """The model of a file with the rates and offsets that fit some points best; the search begins
    at the priors, or at the rates of `near`.

    Raises: UsageError when there are fewer points than rates.
    """
    priors, sigmas = _priors(document)
    names, families = list(priors), sorted({family(point.config) for point in some})
    if len(some) < len(names):
        raise UsageError(f"a fit needs at least {len(names)} measured configs, got {len(some)}")
    prior = prior_model(document)
    most = _MOST | {name: getattr(prior, peak) for name, peak in _PEAKS.items()}
    highest = [math.log(most.get(name, math.inf) / priors[name]) / sigmas[name] for name in names]
    baselines = [not isinstance(point.config, Config) for point in some]
    members = np.array([[family(point.config) == name for name in families] for point in some])

    def model(steps: NDArray[np.float64]) -> MachineModel:
        """The model so many prior standard deviations away from the priors."""
        values = {
            name: priors[name] * math.exp(sigmas[name] * step)
            for name, step in zip(names, steps[: len(names)], strict=True)
        }
        logs = OFFSET_LOG_SIGMA * steps[len(names) :]
        offsets = tuple(zip(families, map(float, logs), strict=True))
        return replace(prior, **values, offsets=offsets)

    def residuals(steps: NDArray[np.float64]) -> NDArray[np.float64]:
        errors = log_errors(some, model(steps), estimate) / NOISE_LOG_SIGMA
        return np.concatenate([errors, steps])

    def slopes(steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Differences for rates, of the points that a rate is for; an offset is its own slope."""
        here = log_errors(some, model(steps), estimate)
        of_errors = np.zeros((len(some), len(steps)))
        of_errors[:, len(names) :] = OFFSET_LOG_SIGMA * members
        for column, name in enumerate(names):
            chosen = np.flatnonzero(baselines) if name in BASELINE_RATES else np.arange(len(some))
            moved = steps.copy()
            moved[column] -= _STEP
            there = log_errors([some[int(i)] for i in chosen], model(moved), estimate)
            of_errors[chosen, column] = (here[chosen] - there) / _STEP
        return np.vstack([of_errors / NOISE_LOG_SIGMA, np.eye(len(steps))])

    start = np.zeros(len(names) + len(families))
    if near:
        logs = dict(near.offsets)
        start[: len(names)] = [math.log(getattr(near, n) / priors[n]) / sigmas[n] for n in names]
        start[len(names) :] = [logs.get(name, 0.0) / OFFSET_LOG_SIGMA for name in families]
    upper = np.array([*highest, *[np.inf] * len(families)])
    solution = least_squares(
        residuals,
        np.minimum(start, upper - 1e-6),
        jac=slopes,  # pyright: ignore[reportArgumentType]
        bounds=(-np.inf, upper),
        loss="soft_l1",
        max_nfev=REFINEMENTS if near else EVALUATIONS,
    )
    return model(solution.x)


def calibrated(some: Sequence[Point], document: dict[str, Any]) -> MachineModel:
    """Fitted to some points, with the log errors of shapes left out in turn as its doubt, and the
    sizes of the points, and the tiles on several GPUs among them, as what it covers."""
    whole = fitted(some, document)
    folds = [_digit(point.problem.shape, 1) % FOLDS for point in some]
    errors: dict[str, list[float]] = {"estimate": [], "simulator": []}
    for fold in sorted(set(folds)):
        kept = [point for point, own in zip(some, folds, strict=True) if own != fold]
        left = [point for point, own in zip(some, folds, strict=True) if own == fold]
        without = fitted(kept, document, whole)
        errors["estimate"] += list(log_errors(left, without, estimate))
        errors["simulator"] += list(log_errors(ours(left)[::SIMULATED], without, simulate))
    doubts = {
        f"{name}_log_sigma": float(np.quantile(np.abs(values), 0.9)) / Z90
        for name, values in errors.items()
    }
    sizes = {name: [getattr(point.problem, name) for point in some] for name in SIZES}
    ranges = tuple((name, min(values), max(values)) for name, values in sizes.items())
    several = [point.config for point in some if point.problem.gpus > 1]
    linked = sorted({tile_kind(config) for config in several if isinstance(config, Config)})
    return replace(whole, **doubts, ranges=ranges, linked=tuple(linked))


def beyond(some: Sequence[Point], size: str, limit: int) -> tuple[list[Point], list[Point]]:
    """Points up to a limit of one size, and those of our kernel two to four times above it, with
    all other sizes (n goes with k) between those of the first."""
    inner = [point for point in some if getattr(point.problem, size) <= limit]
    free = {size, "n"} if size == "k" else {size}
    names = [name for name in SIZES if name not in free]
    spans = [{getattr(point.problem, name) for point in inner} for name in names]
    outer = [
        point
        for point in ours(some)
        if 2 * limit <= getattr(point.problem, size) <= 4 * limit
        and all(
            min(span) <= getattr(point.problem, name) <= max(span)
            for name, span in zip(names, spans, strict=True)
        )
    ]
    return inner, outer


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
        "linked": list(machine.linked),
    }
