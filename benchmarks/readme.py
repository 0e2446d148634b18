"""Writes the results into README.md and docs/latency.png, from the shipped measurements.

Run it after new measurements were shipped: `python benchmarks/readme.py`. A test compares.
"""

from pathlib import Path

from ctatune import race
from ctatune.problem import Problem
from ctatune.records import PROTOCOL
from ctatune.seed import shipped, shipped_shapes

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- results: written by benchmarks/readme.py -->\n", "<!-- end of results -->"


def races() -> dict[Problem, list[race.Line]]:
    """The newest race of every shipped problem, by tokens."""
    rows = [row for shape in shipped_shapes() for row in shipped(shape)]
    problems = sorted({row.problem for row in rows}, key=lambda p: (p.k, p.h, p.n, p.gpus, p.m))
    return {p: race.compare(race.newest([r for r in rows if r.problem == p])) for p in problems}


def results() -> str:
    """The part of the README between the marks."""
    found = races()
    run = next(iter(found.values()))[0].row.run
    about = (
        f"{run.platform.gpus} x {run.platform.gpu}, {run.platform.link}, driver "
        f"{run.platform.driver}, {run.platform.power_limit_w} W, protocol {PROTOCOL}, sustained "
        "load, cold cache. `of ideal`: `single` / GPUs / latency. A tie: the 95 % interval of the "
        "ratio over the interleaved rounds holds 1, or the ratio is within 1 %.\n"
    )
    tables = [race.markdown(problem, lines) for problem, lines in found.items()]
    return "\n".join([about, "![latency over tokens](docs/latency.png)\n", *tables])


def spliced(readme: str) -> str:
    """`readme` with fresh results."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + "\n" + results() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(spliced(path.read_text()))
    race.plot(races(), ROOT / "docs" / "latency.png")
