"""Writes the results into README.md, docs/results.md and docs/latency.png, from what is shipped.

Run it after new measurements were shipped: `python benchmarks/readme.py`. A test compares.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from ctatune import accuracy, race
from ctatune.config import Config
from ctatune.jit import present_kernels
from ctatune.machine_model import DEFAULT_PLATFORM, document
from ctatune.problem import Problem
from ctatune.rows import Row
from ctatune.seed import shipped_rows
from ctatune.stats import ratio_interval, verdict

ROOT = Path(__file__).parent.parent
ERRORS = "<!-- errors: written by benchmarks/readme.py -->\n"
END_ERRORS = "<!-- end of errors -->"
BEGIN, END = "<!-- results: written by benchmarks/readme.py -->\n", "<!-- end of results -->"
ONE = ("shape", "ours us", "cuBLAS us", "fastest")
SEVERAL = (
    "tokens",
    "ours us",
    "of ideal",
    "pure pipeline us",
    "best TP us",
    "micro-batches us",
    "fastest",
    "load",
)
TP = ("tp", "tp_twoshot")
MICRO = ("microbatch", "microbatch_cta")
Races = dict[Problem, list[race.Line]]


def races() -> Races:
    """The newest race of every shipped problem, by tokens."""
    rows = shipped_rows()
    problems = sorted({row.problem for row in rows}, key=lambda p: (p.k, p.h, p.n, p.gpus, p.m))
    found = {p: race.compare(race.newest([r for r in rows if r.problem == p])) for p in problems}
    return {problem: lines for problem, lines in found.items() if lines}


def fastest(lines: Sequence[race.Line], *methods: str) -> race.Line | None:
    """The first line of one of the methods; lines come fastest first."""
    return next((line for line in lines if line.row.config.method in methods), None)


def cell(line: race.Line | None, ours: race.Line) -> str:
    """Latency of an opponent, and what ours takes of it."""
    if line is None:
        return ""
    return f"{line.latency_us:.1f} ({ours.latency_us / line.latency_us - 1:+.0%})"


def loaded(ours: race.Line) -> str:
    """The part of the time in which the GPUs worked while the race loaded them."""
    state = ours.row.measurement.gpu_state
    gate = ", gate" * bool(state.get("closed_s", True))
    return f"{state['duty']:.0%}{gate}" if "duty" in state else ""


def said(lines: Sequence[race.Line], ours: race.Line) -> str:
    """Who wins among the methods that may answer."""
    able = ("single",) if ours.row.problem.gpus == 1 else (*TP, *MICRO)
    best = fastest(lines, *able)
    if best is None:
        return ""
    ratio = ratio_interval(ours.row.measurement.samples_us, best.row.measurement.samples_us)
    word = verdict(*ratio)
    name = best.row.config.method
    return {"faster": "ours", "slower": name}.get(word, f"a tie with {name}")


def about(lines: Sequence[race.Line]) -> str:
    """The machine of a race, and which version of our kernel ran in it."""
    run = lines[0].row.run
    machine = run.platform
    kernels = {line.row.kernel_hash for line in lines} - {None}
    old = "" if kernels <= present_kernels() else ", an older version of our kernel"
    return (
        f"{machine.name}: {machine.gpus} x {machine.gpu}, {machine.link}, driver {machine.driver}, "
        f"{machine.power_limit_w} W, {run.utc[:10]}, protocol {lines[0].row.protocol}{old}"
    )


def cells(lines: Sequence[race.Line], ours: race.Line) -> tuple[str, ...]:
    """A row of the summary."""
    problem, us = ours.row.problem, f"{ours.latency_us:.1f}"
    if problem.gpus == 1:
        return problem.shape, us, cell(fastest(lines, "single"), ours), said(lines, ours)
    pipelines = (x for x in lines if isinstance(c := x.row.config, Config) and c.mix == 0.0)
    pure = next(pipelines, None)
    return (
        str(problem.m),
        us,
        "" if ours.ideal is None else f"{ours.ideal:.0%}",
        "" if pure is None else f"{pure.latency_us:.1f}",
        cell(fastest(lines, *TP), ours),
        cell(fastest(lines, *MICRO), ours),
        said(lines, ours),
        loaded(ours),
    )


def ranges(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The percentages of each column of a table of several races, least and greatest."""
    found = []
    for name, *column in zip(head, *rows, strict=True):
        parts = [int(part) for text in column for part in re.findall(r"([+-]?\d+)%", text)]
        if len(parts) > 2:
            found.append(f"{name.removesuffix(' us')} {min(parts)} .. {max(parts)} %")
    return f"\nPercentages: {', '.join(found)}.\n" if found else ""


def against_cublas(group: Races) -> str:
    """What cuBLAS takes of our latency on one GPU, over all races."""
    both = [
        (single.latency_us / ours.latency_us, said(lines, ours))
        for lines in group.values()
        if (ours := fastest(lines, "cta")) and (single := fastest(lines, "single"))
    ]
    found, words = zip(*both, strict=True)
    ties = sum(word.startswith("a tie") for word in words)
    return (
        f"\ncuBLAS over ours: {min(found):.3f} .. {max(found):.3f}, geometric mean "
        f"{geometric_mean(found):.3f} of {len(found)} shapes; {words.count('ours')} times ours is "
        f"faster, {ties} times it ties.\n"
    )


def origin(group: Races) -> str:
    """On what the races of a table ran; of which shapes, where that differs."""
    shapes: dict[str, list[str]] = {}
    for problem, lines in group.items():
        shapes.setdefault(about(lines), []).append(problem.shape)
    if len(shapes) == 1:
        return next(iter(shapes))
    return "; ".join(f"{', '.join(some)}: {text}" for text, some in shapes.items())


def summary(found: Races) -> str:
    """A table for one GPU, and for several one for each size of the weights."""
    groups: dict[tuple[int, ...], Races] = {}
    for p, lines in found.items():
        if fastest(lines, "cta"):
            key = (1,) if p.gpus == 1 else (p.gpus, p.k, p.h, p.n)
            groups.setdefault(key, {})[p] = lines
    parts = []
    for (gpus, *weights), group in sorted(groups.items(), reverse=True):
        head = ONE if gpus == 1 else SEVERAL
        rows = [cells(x, ours) for x in group.values() if (ours := fastest(x, "cta"))]
        sizes = [f"{name} {size}" for name, size in zip("khn", weights, strict=False)]
        title = ", ".join([f"{gpus} GPU{'s' * (gpus > 1)}", *sizes])
        spread = ranges(head, rows) if gpus > 1 else against_cublas(group)
        parts.append(f"**{title}** ({origin(group)}):\n\n{race.table(head, *rows)}\n{spread}")
    return "\n".join(parts)


def controls(protocol: int) -> list[race.Control]:
    """The shipped A/A pairs that were raced by a protocol."""
    return race.controls([row for row in shipped_rows() if row.protocol == protocol])


def winners() -> dict[Problem, dict[str, str]]:
    """Who won the shipped races of the present protocol, for problems raced on several days, by
    day."""
    days: dict[Problem, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in shipped_rows():
        if row.of_this_protocol:
            days[row.problem][row.run.utc[:10]].append(row)
    found: dict[Problem, dict[str, str]] = {}
    for problem, by_day in days.items():
        for day, rows in by_day.items():
            lines = race.compare(race.newest(rows))
            if (ours := fastest(lines, "cta")) and (word := said(lines, ours)):
                found.setdefault(problem, {})[day] = word
    return {problem: by_day for problem, by_day in found.items() if len(by_day) > 1}


def contradicted(by_day: dict[str, str]) -> bool:
    """Whether the winner of one day is another one on another day, and neither calls it a tie."""
    return len({word for word in by_day.values() if not word.startswith("a tie")}) > 1


def results() -> str:
    """The part of the README between the marks."""
    found = races()
    head = (
        "Cold cache, Y2 replicated, medians. `of ideal`: `single` / GPUs / ours. In brackets: our "
        "latency against the opponent's, of medians. `load`: the part of the time for which the "
        "GPUs were kept busy, and whether they rested behind a gate. Every method of every race, "
        "with intervals: [docs/results.md](docs/results.md).\n"
    )
    counts = [
        f"{sum(pair.verdict != 'tie' for pair in pairs)} of {len(pairs)} by protocol {number}"
        for number in sorted({row.protocol for row in shipped_rows()})
        if (pairs := controls(number))
    ]
    control = (
        "Of configs that ran twice in a race, one of these or an older one (A/A), so many are not "
        f"called a tie with themselves: {', '.join(counts)}.\n"
    )
    several = winners()
    if several:
        control += (
            f"Raced on two days or more by the present protocol: {len(several)} problems; "
            f"{sum(map(contradicted, several.values()))} of them with another winner that is no "
            "tie.\n"
        )
    plot = "![latency over tokens](docs/latency.png)\n"
    return "\n".join([head, summary(found), control, plot])


def details() -> str:
    """docs/results.md: the whole table of every race."""
    head = (
        "# Results\n\nWritten by `benchmarks/readme.py` from `db/measurements`. A tie: the "
        "difference is not beyond doubt, or under 1 %. The ratio is the median over the rounds, "
        "so it need not follow from the medians beside it. `rowsplit` copies all weights and "
        "`single` leaves Y2 on one GPU: they are yardsticks, not answers. Long commands are cut.\n"
    )
    tables = [race.markdown(problem, race.shown(lines)) for problem, lines in races().items()]
    return "\n".join([head, *tables])


def errors() -> str:
    """How wrong the shipped model is, as its file says."""
    about = document(DEFAULT_PLATFORM)["fit"]
    found = about["held_out"].items()
    text = (
        f"{about['points']} configs of {about['shapes']} shapes were fitted; errors on those of "
        f"{len(about['held_out_shapes'])} others ({', '.join(about['held_out_shapes'])}):\n\n"
    )
    text += accuracy.table({name: accuracy.Accuracy(**values) for name, values in found})
    if about["regret"]:
        text += (
            "\n\nWhat it costs to run what the estimate ranks first, and the best of its first "
            "eight, where the whole space of such a shape (or 300 configs of it) was measured:\n\n"
        )
        text += accuracy.regret_table([accuracy.Regret(**values) for values in about["regret"]])
    return text


def spliced(readme: str) -> str:
    """`readme` with fresh results and errors."""
    for begin, end, text in ((BEGIN, END, results()), (ERRORS, END_ERRORS, errors() + "\n")):
        before, rest = readme.split(begin)
        readme = before + begin + "\n" + text + "\n" + end + rest.split(end)[1]
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(spliced(path.read_text()))
    (ROOT / "docs" / "results.md").write_text(details())
    several = {problem: lines for problem, lines in races().items() if problem.gpus > 1}
    race.plot(several, ROOT / "docs" / "latency.png")
