"""The table of a race: finalists and baselines that ran interleaved in one run, compared fairly."""

# The extra is not installed where the code is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctatune.config import AnyConfig
from ctatune.errors import DeviceError, UsageError
from ctatune.known import how_old
from ctatune.problem import Problem
from ctatune.rows import Row
from ctatune.stats import Verdict, ratio_interval, verdict

COMMAND = 80  # characters of a run's command that a table shows
HEAD = ("method", "us", "95 % interval", "to best baseline", "of ideal", "J")
IMAGES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One contestant. `ratio` is the median over rounds of its latency over the best baseline's,
    with its interval; `ideal` is `single` / GPUs / latency; `energy_j` is joules a call of all
    GPUs under load, None where they were not counted."""

    row: Row
    latency_us: float
    interval_us: tuple[float, float]
    ratio: float
    ratio_interval: tuple[float, float]
    ideal: float | None
    energy_j: float | None

    @property
    def tie(self) -> bool:
        """Whether it cannot be told from the best baseline."""
        return verdict(self.ratio, *self.ratio_interval) == "tie"


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A config that ran twice in one race (A/A): its second latency over its first."""

    config: AnyConfig
    ratio: float
    ratio_interval: tuple[float, float]

    @property
    def verdict(self) -> Verdict:
        """What the product says of the pair; anything but a tie is false."""
        return verdict(self.ratio, *self.ratio_interval)

    def __str__(self) -> str:
        low, high = self.ratio_interval
        return f"{self.config} {self.ratio:.3f} ({low:.3f} .. {high:.3f}), {self.verdict}"


def newest(rows: Sequence[Row]) -> list[Row]:
    """The finals of the newest race of ours against a rival, else with a rival, else of the newest
    one: rows of one run and equally many rounds, one a config."""
    good = [r for r in rows if r.measurement.phase == "final" and r.measurement.timed]
    with_ours = {r.run.utc for r in good if r.config.method == "cta"}
    rivals = [r for r in good if _is_rival(r)]
    against = [r for r in rivals if r.run.utc in with_ours]
    last = max(against or rivals or good, key=lambda row: row.age, default=None)
    if last is None:
        return []
    race = [r for r in good if r.run == last.run and _rounds(r) == _rounds(last)]
    return list({r.config: r for r in sorted(race, key=lambda row: row.age)}.values())


def _is_rival(row: Row) -> bool:
    """Whether ratios may be to this row: a baseline, `single` only where there is one GPU."""
    return row.config.method not in (("cta",) if row.problem.gpus == 1 else ("cta", "single"))


def _rounds(row: Row) -> int:
    return len(row.measurement.samples_us)


def controls(rows: Sequence[Row]) -> list[Control]:
    """The A/A pairs among the rows: each control, the oldest first, with the final it repeats."""
    timed = sorted((row for row in rows if row.measurement.timed), key=lambda row: row.age)
    finals = {_pair(row): row for row in timed if row.measurement.phase == "final"}
    pairs: list[Control] = []
    for row in timed:
        if row.measurement.phase == "control" and (first := finals.get(_pair(row))):
            both = row.measurement.samples_us, first.measurement.samples_us
            ratio, low, high = ratio_interval(*both)
            pairs.append(Control(config=row.config, ratio=ratio, ratio_interval=(low, high)))
    return pairs


def _pair(row: Row) -> tuple[object, ...]:
    """What a control and its final have in common."""
    return row.run.utc, row.run.id, row.problem, row.config, _rounds(row)


def compare(rows: Sequence[Row]) -> list[Line]:
    """The lines of one race, fastest first; empty without rows."""
    if not rows:
        return []
    rivals = [row for row in rows if _is_rival(row)]
    best = min(rivals or rows, key=_latency)
    single = next((r for r in rows if r.config.method == "single"), None)
    return [_line(row, best, single) for row in sorted(rows, key=_latency)]


def _latency(row: Row) -> float:
    return row.measurement.latency_us or 0.0


def _line(row: Row, best: Row, single: Row | None) -> Line:
    ratio, low, high = ratio_interval(row.measurement.samples_us, best.measurement.samples_us)
    ideal = None
    if single is not None:
        ideal = _latency(single) / row.problem.gpus / _latency(row)
    return Line(
        row=row,
        latency_us=_latency(row),
        interval_us=row.measurement.interval_us or (0.0, 0.0),
        ratio=ratio,
        ratio_interval=(low, high),
        ideal=ideal,
        energy_j=_energy_j(row),
    )


def _energy_j(row: Row) -> float | None:
    found = row.measurement.gpu_state.get("joules")
    return float(found) if isinstance(found, int | float) else None


def cells(line: Line) -> tuple[str, ...]:
    """The line as text, in the order of HEAD."""
    low, high = line.interval_us
    ratio = f"{line.ratio:.3f}" + (" (tie)" if line.tie and line.ratio != 1.0 else "")
    ideal = "" if line.ideal is None else f"{line.ideal:.0%}"
    energy = "" if line.energy_j is None else f"{line.energy_j:.3g}"
    latency, interval = f"{line.latency_us:.1f}", f"{low:.1f} .. {high:.1f}"
    return str(line.row.config), latency, interval, ratio, ideal, energy


def table(head: Sequence[str], *rows: Sequence[str]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(problem: Problem, lines: Sequence[Line]) -> str:
    """The table of one race as Markdown, with what it was measured on."""
    if not lines:
        return f"{problem.shape}: no race is stored\n"
    run, rounds = lines[0].row.run, _rounds(lines[0].row)
    about = f"{problem.shape}, {problem.output}, {problem.gpus} x {run.platform.gpu}"
    rows = [HEAD, *map(cells, lines)]
    if all(line.energy_j is None for line in lines):  # races before energy was counted
        rows = [row[:-1] for row in rows]
    text = table(*rows)
    command = run.command if len(run.command) <= COMMAND else run.command[: COMMAND - 4] + " ..."
    old = how_old(line.row for line in lines)
    when = run.utc[:10] + f", measured{old}" * bool(old)
    return f"{about} ({when}, {rounds} interleaved rounds, `{command}`):\n\n{text}\n"


def shown(lines: Sequence[Line]) -> list[Line]:
    """The lines that a person reads: all of our kernel, and the fastest of every other method."""
    seen: set[str] = set()
    kept = []
    for line in sorted(lines, key=lambda line: line.latency_us):
        method = line.row.config.method
        if method == "cta" or method not in seen:
            kept.append(line)
        seen.add(method)
    return kept


def control_line(rows: Sequence[Row], lines: Sequence[Line]) -> str:
    """The A/A pairs of the race with these lines as one line of text; empty without any."""
    pairs = _controls_of(rows, lines)
    return f"\nA/A control: {'; '.join(map(str, pairs))}\n" if pairs else ""


def _controls_of(rows: Sequence[Row], lines: Sequence[Line]) -> list[Control]:
    return controls([row for row in rows if lines and row.run == lines[0].row.run])


def document(rows: Sequence[Row], lines: Sequence[Line]) -> dict[str, list[dict[str, object]]]:
    """The lines, and the A/A pairs of their race among `rows`, as plain values for JSON."""
    again: list[dict[str, object]] = [
        {
            "config": str(pair.config),
            "ratio": pair.ratio,
            "ratio_interval": pair.ratio_interval,
            "verdict": pair.verdict,
        }
        for pair in _controls_of(rows, lines)
    ]
    contestants: list[dict[str, object]] = [
        {
            "method": line.row.config.method,
            "config": str(line.row.config),
            "latency_us": line.latency_us,
            "interval_us": line.interval_us,
            "ratio_to_best_baseline": line.ratio,
            "ratio_interval": line.ratio_interval,
            "share_of_ideal": line.ideal,
            "energy_j": line.energy_j,
        }
        for line in lines
    ]
    return {"lines": contestants, "control": again}


def check_plot(path: Path) -> None:
    """That `plot` can write an image there, known before a long race.

    Raises: UsageError for a path that cannot be written or is no IMAGES; DeviceError without
    matplotlib (extra `plots`).
    """
    if path.suffix not in IMAGES:
        raise UsageError(f"a plot must end with one of {', '.join(IMAGES)}, got {str(path)!r}")
    try:
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    if importlib.util.find_spec("matplotlib") is None:
        raise DeviceError("matplotlib is not installed (extra `plots`)")


def plot(races: dict[Problem, list[Line]], path: Path) -> None:
    """Latency over ideal (`single` / GPUs) by tokens, a curve a method, as an image.

    Each size of the weights has its own axes. See `check_plot`.
    """
    from matplotlib.figure import Figure

    sizes = sorted({_weights(problem) for problem in races}) or [(0, 0, 0)]
    figure = Figure(figsize=(7 * len(sizes), 4), layout="constrained")
    methods = sorted({line.row.config.method for lines in races.values() for line in lines})
    colours = {method: f"C{i}" for i, method in enumerate(methods)}
    all_axes = figure.subplots(1, len(sizes), squeeze=False)[0]
    for axes, size in zip(all_axes, sizes, strict=True):
        ours = {problem: lines for problem, lines in races.items() if _weights(problem) == size}
        for method, by_m in sorted(curves(ours).items()):
            values = [by_m[m] for m in sorted(by_m)]
            axes.plot(sorted(by_m), values, marker="o", label=method, color=colours[method])
        tokens = sorted({problem.m for problem in ours})
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, labels=map(str, tokens))
        axes.set(
            xlabel="tokens",
            ylabel="latency / (single / GPUs)",
            title="k {} h {} n {}".format(*size),
        )
        if axes.lines:
            axes.legend()
    figure.savefig(path)


def _weights(problem: Problem) -> tuple[int, int, int]:
    return problem.k, problem.h, problem.n


def curves(races: dict[Problem, list[Line]]) -> dict[str, dict[int, float]]:
    """Latency over ideal of the fastest of each method, by tokens."""
    found: dict[str, dict[int, float]] = {}
    for problem, lines in races.items():
        for line in shown(lines)[::-1]:  # the fastest of a method comes last and stays
            if line.ideal:
                found.setdefault(line.row.config.method, {})[problem.m] = 1 / line.ideal
    return found
