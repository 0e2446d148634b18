"""Whether two versions of our kernel are equally fast, from the races that are shipped.

    python benchmarks/versions.py

For each version that `kernels/equal.json` calls as fast as one before it, and each config that was
raced with both by one protocol: how its latency over that of the same baselines, interleaved in
each race, changed from the older version to the present one. Machine, day and clocks are in
neither ratio.
"""

from collections import defaultdict
from collections.abc import Iterator
from math import exp, log
from statistics import fmean

from ctatune import jit, race
from ctatune.config import AnyConfig, Config
from ctatune.known import has_whole_tiles
from ctatune.problem import Problem
from ctatune.rows import Row
from ctatune.seed import shipped_rows

Races = dict[str, dict[AnyConfig, float]]  # of each version: latencies of its newest race


def links() -> list[tuple[str, str, bool]]:
    """Each version that was raced against one before it, that one, and whether only where tiles are
    whole."""
    return [
        (new, old, "whole" in kind)
        for new, kinds in jit._equal_kernels().items()
        for kind, olds in kinds.items()
        if kind != "same code"
        for old in olds
    ]


def code_of(kernel: str) -> str:
    """The oldest version with the same machine code."""
    older = next(iter(jit._equal_kernels().get(kernel, {}).get("same code", {})), None)
    return code_of(older) if older else kernel


def races_of(rows: list[Row]) -> Races:
    """The newest race of each machine code of the kernel, of the rows of one problem."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[code_of(row.run.versions["kernel"])].append(row)
    return {
        kernel: {
            row.config: row.measurement.latency_us
            for row in race.newest(some)
            if row.good and row.measurement.latency_us
        }
        for kernel, some in found.items()
    }


def changes(races: Races, new: str, old: str) -> Iterator[tuple[Config, float]]:
    """For each config of ours that ran in a race of both versions: its latency with the new one
    over that with the old one, each over the geometric mean of the baselines of both races."""
    if not {new, old} <= races.keys():
        return
    both = [config for config in races[new] if config in races[old]]
    rivals = [config for config in both if not isinstance(config, Config)]
    for config in both if rivals else ():
        if isinstance(config, Config):
            drift = fmean(log(races[new][c] / races[old][c]) for c in rivals)
            yield config, races[new][config] / races[old][config] / exp(drift)


def compared(new: str, old: str, whole: bool) -> list[tuple[Problem, Config, float]]:
    """The changes of all shipped problems, or of `whole` tiles only."""
    of: dict[tuple[Problem, int], list[Row]] = defaultdict(list)
    for row in shipped_rows():
        of[row.problem, row.protocol].append(row)
    found = [
        (problem, config, ratio)
        for (problem, _), rows in of.items()
        for config, ratio in changes(races_of(rows), code_of(new), code_of(old))
        if not whole or has_whole_tiles(problem, config)
    ]
    return sorted(found, key=lambda one: (one[0].gpus, one[0].k, one[0].h, one[0].n, one[0].m))


def main() -> None:
    for new, old, whole in links():
        found = compared(new, old, whole)
        for problem, config, ratio in found:
            print(f"{ratio:.3f} {problem.gpus} {problem.shape} {config}")
        for gpus in sorted({problem.gpus for problem, _, _ in found}):
            ratios = [ratio for problem, _, ratio in found if problem.gpus == gpus]
            print(
                f"{old} to {new}, {gpus} GPU{'s' * (gpus > 1)}: {len(ratios)} configs, "
                f"geometric mean {exp(fmean(map(log, ratios))):.3f}, "
                f"{min(ratios):.3f} .. {max(ratios):.3f}"
            )
        if not found:
            print(f"{old} to {new}: no config was raced with both")


if __name__ == "__main__":
    main()
