"""What the models expect of a shape on more GPUs than were measured, for each way to run it.

    python benchmarks/predict.py 8 4096x8192x8192 8192x8192x28672

For each mix of pipeline and tensor parallelism the config that the estimate prefers, over stage
splits, tiles and orders, is simulated. Nothing here is measured.
"""

import sys
from collections.abc import Iterator

from ctatune import space
from ctatune.baseline_latency import modelled
from ctatune.config import Config
from ctatune.latency import estimate
from ctatune.machine_model import load
from ctatune.problem import Problem
from ctatune.race import table
from ctatune.simulate import simulate

Way = tuple[float, str]  # mix, axis of `down`
WAYS: list[Way] = [*((mix, "n") for mix in sorted(space.MIXES)), (1.0, "h")]
HEAD = ("shape", "mix 0", "1/4", "1/2", "3/4", "1, along n", "1, along h", "tp", "tp_twoshot")


def cells(problem: Problem) -> Iterator[str]:
    """A row of the table, in microseconds."""
    machine = load().for_gpus(problem.gpus)
    best: dict[Way, tuple[float, Config]] = {}
    for config in space.candidates(problem):
        latency_us = estimate(problem, config, machine).latency_us
        way = config.mix, config.down_axis
        if way not in best or latency_us < best[way][0]:
            best[way] = latency_us, config
    yield problem.shape
    for way in WAYS:
        _, config = best[way]
        split = "" if config.mix == 1.0 else " ({}:{})".format(*config.stage_split)
        yield f"{simulate(problem, config, machine).latency_us:.0f}{split}"
    for baseline in modelled(problem):
        if baseline.method != "single":
            yield f"{estimate(problem, baseline, machine).latency_us:.0f}"


def main() -> None:
    gpus, *shapes = sys.argv[1:]
    problems = [Problem.of(shape, gpus=int(gpus)) for shape in shapes]
    print(f"Simulated on {gpus} GPUs, us; in brackets the GPUs of each stage:\n")
    print(table(HEAD, *(tuple(cells(problem)) for problem in problems)))


if __name__ == "__main__":
    main()
