"""How far the models can be trusted: errors on shapes that no fit saw, beside simpler opponents."""

# The extra is not installed where the code is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctatune import race
from ctatune.computed import rank
from ctatune.config import AnyConfig, Config
from ctatune.fit import LIMITS, Point, Predict, beyond, fitted, log_errors, ours
from ctatune.latency import estimate
from ctatune.machine_model import MachineModel, family
from ctatune.problem import Problem
from ctatune.simulate import simulate

EXPLORED, LEAST, TOP = 300, 50, 8  # configs of a space; in a smaller one nothing can go wrong
REGRET_HEAD = ("shape that no fit saw", "configs", "regret of the first", f"of the best of {TOP}")
HEAD = ("model", "points", "MAPE", "90 % under", "worst", "in its interval")
GROUPS: dict[str, Callable[[Point], str]] = {
    "method": lambda p: p.config.method,
    "GPUs": lambda p: str(p.problem.gpus),
    "tokens": lambda p: "under 512" if p.problem.m < 512 else "512 and more",
    "mix": lambda p: f"{p.config.mix:g}" if isinstance(p.config, Config) else "",
    "family": lambda p: family(p.config) if isinstance(p.config, Config) else "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Relative errors of a model on some points; `inside` is the part in its 90 % intervals, None
    for a model without."""

    points: int
    mape: float
    p90: float
    worst: float
    inside: float | None = None


class Regret(NamedTuple):
    """How much slower than the fastest of a shape's measured configs the estimate's first one is,
    and the best of its first TOP."""

    shape: str
    configs: int
    first: float
    best: float


def _of(logs: NDArray[np.float64], inside: NDArray[np.bool_] | None = None) -> Accuracy:
    errors = np.abs(np.expm1(logs))
    return Accuracy(
        points=len(errors),
        mape=float(errors.mean()),
        p90=float(np.quantile(errors, 0.9)),
        worst=float(errors.max()),
        inside=None if inside is None else float(inside.mean()),
    )


def accuracy(some: Sequence[Point], machine: MachineModel, predict: Predict) -> Accuracy:
    """Errors of a model on some points, at least one."""
    return _of(*_judged(some, machine, predict))


def _judged(
    some: Sequence[Point], machine: MachineModel, predict: Predict
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Of each point the log error of a model, and whether it lies in the model's interval."""
    predicted = [predict(point.problem, point.config, machine) for point in some]
    measured = np.array([point.latency_us for point in some])
    low, high = np.transpose([prediction.interval_us for prediction in predicted])
    inside = (low <= measured) & (measured <= high)
    return np.log([prediction.latency_us for prediction in predicted]) - np.log(measured), inside


def fingerprint(some: Iterable[Point]) -> str:
    """SHA-256 of the points: a fit of other data has another one."""
    lines = (f"{p.problem} {p.config.canonical()} {p.latency_us!r}" for p in some)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def held_out(
    train: Sequence[Point], held: Sequence[Point], machine: MachineModel
) -> dict[str, Accuracy]:
    """Errors on shapes that no fit saw, of both models (also for each number of GPUs) and of their
    opponents: all on the points of our kernel, and the estimate on those of baselines."""
    cta = ours(held)
    judged = {
        "estimate": _judged(cta, machine, estimate),
        "simulator": _judged(cta, machine, simulate),
    }
    found = {name: _of(*both) for name, both in judged.items()}
    found["roofline"] = _of(_roofline_errors(train, cta, machine))
    counts = np.array([point.problem.gpus for point in cta])
    for gpus in sorted(set(counts.tolist())):
        for name, (errors, inside) in judged.items():
            title = f"{name}, {gpus} GPU{'s' * (gpus > 1)}"
            found[title] = _of(errors[counts == gpus], inside[counts == gpus])
    if importlib.util.find_spec("sklearn"):
        found["gradient boosting"] = _of(_boosting_errors(train, cta, machine))
    theirs = [point for point in held if not isinstance(point.config, Config)]
    found["estimate of baselines"] = accuracy(theirs, machine, estimate)
    single = [point for point in theirs if point.config.method == "single"]
    if single and importlib.util.find_spec("nvMatmulHeuristics"):
        found["estimate of single"] = accuracy(single, machine, estimate)
        found["nvidia-matmul-heuristics of single"] = _of(_heuristics_errors(single))
    return found


def outside(some: Sequence[Point], model_file: dict[str, Any]) -> dict[str, Accuracy]:
    """Errors of the estimate two to four times beyond what it was fitted to, in one size."""
    found = {}
    for size, limit in LIMITS:
        inner, outer = beyond(some, size, limit)
        if outer:
            machine = fitted(inner, model_file)
            found[f"estimate, {size} beyond {limit}"] = accuracy(outer, machine, estimate)
    return found


def regrets(held: Sequence[Point], machine: MachineModel) -> list[Regret]:
    """What it costs to run what the estimate ranks first, unmeasured, on held-out shapes of which
    the whole space was measured, or EXPLORED of its configs."""
    by_problem: dict[Problem, dict[AnyConfig, float]] = defaultdict(dict)
    for point in ours(held):
        by_problem[point.problem][point.config] = point.latency_us
    found = []
    for problem, measured in by_problem.items():
        space = rank(problem, machine)
        ranked = [measured[config] for config in space if config in measured]
        if len(ranked) >= max(LEAST, min(EXPLORED, len(space))):
            least_us = min(ranked)
            over = [round(us / least_us - 1.0, 6) for us in ranked[:TOP]]
            shape = f"{problem.shape} on {problem.gpus} GPU{'s' * (problem.gpus > 1)}"
            found.append(Regret(shape, len(ranked), over[0], min(over)))
    return found


def regret_table(found: Sequence[Regret]) -> str:
    """A line for each shape, and the means, as Markdown."""
    means = (f"{np.mean([getattr(r, name) for r in found]):.1%}" for name in ("first", "best"))
    lines = [(r.shape, str(r.configs), f"{r.first:.1%}", f"{r.best:.1%}") for r in found]
    return race.table(REGRET_HEAD, *lines, ("mean", "", *means))


def document(found: dict[str, Accuracy]) -> dict[str, dict[str, float]]:
    """Plain values, rounded, for a model file."""
    return {
        name: {k: round(v, 6) for k, v in asdict(errors).items() if v is not None}
        for name, errors in found.items()
    }


def table(found: dict[str, Accuracy]) -> str:
    """A line for each model, as Markdown."""
    return race.table(HEAD, *(_cells(name, value) for name, value in found.items()))


def groups(held: Sequence[Point], machine: MachineModel) -> str:
    """Errors of the estimate by what the held-out points are, as Markdown."""
    rows = []
    for title, group_of in GROUPS.items():
        for name in sorted({group_of(point) for point in held} - {""}):
            some = [point for point in held if group_of(point) == name]
            rows.append(_cells(f"{title} {name}", accuracy(some, machine, estimate)))
    return race.table(("estimate by", *HEAD[1:]), *rows)


def plot(held: Sequence[Point], machine: MachineModel, path: Path) -> None:
    """Estimated over measured latency of held-out points, as an image; see `race.check_plot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for method in sorted({point.config.method for point in held}):
        some = [point for point in held if point.config.method == method]
        ratios = np.exp(log_errors(some, machine, estimate))
        axes.plot([point.latency_us for point in some], ratios, "o", label=method)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.set(xlabel="measured us", ylabel="estimate / measured", title="shapes that no fit saw")
    axes.legend()
    figure.savefig(path)


def _cells(name: str, value: Accuracy) -> tuple[str, ...]:
    inside = "" if value.inside is None else f"{value.inside:.0%}"
    shares = (f"{share:.1%}" for share in (value.mape, value.p90, value.worst))
    return (name, str(value.points), *shares, inside)


def _over_roofline(point: Point, machine: MachineModel) -> float:
    """Log of measured latency over the roofline of the GPUs that a method uses."""
    gpus = 1 if point.config.method == "single" else point.problem.gpus
    return math.log(point.latency_us / machine.roofline_us(point.problem, gpus))


def _roofline_errors(
    train: Sequence[Point], held: Sequence[Point], machine: MachineModel
) -> NDArray[np.float64]:
    """The roofline times one efficiency, the median of what was measured."""
    efficiency = np.median([_over_roofline(point, machine) for point in train])
    return np.array([efficiency - _over_roofline(point, machine) for point in held])


def _boosting_errors(
    train: Sequence[Point], held: Sequence[Point], machine: MachineModel
) -> NDArray[np.float64]:
    """Gradient boosting over sizes and choices, for the same ratio to the roofline."""
    from sklearn.ensemble import GradientBoostingRegressor

    model = GradientBoostingRegressor(random_state=0)
    model.fit([_features(p) for p in train], [_over_roofline(p, machine) for p in train])
    predicted = model.predict([_features(p) for p in held])
    return predicted - np.array([_over_roofline(p, machine) for p in held])


def _heuristics_errors(single: Sequence[Point]) -> NDArray[np.float64]:
    """Log errors of nvidia-matmul-heuristics, which ranks kernels, on an H200: for each layer of a
    call its fastest kernel for bf16."""
    import nvMatmulHeuristics as nv  # noqa: N813

    interface = nv.NvMatmulHeuristicsInterface(
        backend=nv.NvMatmulHeuristicsTarget.CUTLASS3,
        precision="TST",  # bf16 in and out, fp32 sums
        flags=nv.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
    )
    gpu = interface.createHardwareDescriptor()
    interface.setHardwarePredefinedGpu(gpu, nv.NvMatmulHeuristicsNvidiaGpu.H200_SXM)
    layout = nv.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR
    interface.loadInternalDiscoverySet(layout, gpu)

    def call_us(problem: Problem) -> float:
        sizes = [(problem.m, layer.outputs, layer.inputs) for layer in problem.layers]
        best = [interface.get_with_mnk(*mnk, layout, 1, gpu)[0]["runtime"] for mnk in sizes]
        return 1e6 * sum(best)

    expected_us = [call_us(point.problem) for point in single]
    interface.handle = ctypes.c_void_p()  # version 0.1.0.27 crashes when it is destroyed
    return np.log(expected_us) - np.log([point.latency_us for point in single])


def _features(point: Point) -> list[float]:
    problem, config = point.problem, point.config
    sizes = [math.log(size) for size in (problem.m, problem.k, problem.h, problem.n)]
    method = ("cta", "single", "tp", "tp_twoshot").index(config.method)
    if not isinstance(config, Config):
        return [*sizes, problem.gpus, method, *[0.0] * 17]
    up, down, p_up = config.up, config.down, config.stage_split[0]
    tiles = (up.m, up.n, up.split_k, up.group_m, down.m, down.n, down.split_k, down.group_m)
    choices = (config.stages, config.d_slabs, config.mix, p_up, config.pace_us)
    kind = (config.multicast, config.direct, config.swap_ab, config.down_axis == "h")
    return [*sizes, problem.gpus, method, *tiles, *choices, *kind]
