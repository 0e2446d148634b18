"""What to measure so that models can be fitted: shapes and configs that differ in everything.

Screenings, not races: many points under one kind of load. A plan is the same on each day, and a
shape that `fit.is_held_out` is measured like the others.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import product

from ctatune.config import AnyConfig, Config
from ctatune.machine_model import family
from ctatune.problem import Problem
from ctatune.space import baselines, candidates, defaults

# Square layers of two widths, and those of Llama 3 8B and 70B and of Qwen 2.5 32B; ragged tokens.
WEIGHTS = ((4096, 4096), (8192, 8192), (4096, 14336), (8192, 28672), (5120, 27648))
TOKENS = (1, 16, 48, 64, 128, 200, 256, 512, 1000, 1024, 2048, 4096)
CONFIGS = 14  # a shape, of ours


def problems(gpus: int) -> list[Problem]:
    """The shapes of a calibration, in an order in which any beginning of it is a mixture."""
    found = [Problem(m=m, k=k, h=h, n=k, gpus=gpus) for m, (k, h) in product(TOKENS, WEIGHTS)]
    random.Random(0).shuffle(found)
    return found


def plan(problem: Problem, configs: int | None = None) -> list[AnyConfig]:
    """What is measured of a shape: baselines in one variant each and not in parts, the defaults,
    then some of each family, so many of ours in all (None: CONFIGS), or the whole space."""
    chosen = defaults(problem)
    for config in _turns(problem):
        if len(chosen) >= (configs or CONFIGS):
            break
        if config not in chosen:
            chosen.append(config)
    plain = [b for b in baselines(problem) if not (b.chunk or b.nccl or b.graph)]
    return [*plain, *chosen]


def _turns(problem: Problem) -> Iterator[Config]:
    """Random configs of the space, the families in turn; the same for a shape on each day."""
    draws = random.Random(problem.shape)
    families: dict[str, list[Config]] = defaultdict(list)
    for config in candidates(problem):
        families[family(config)].append(config)
    kinds = list(families.values())
    draws.shuffle(kinds)
    for own in kinds:
        draws.shuffle(own)
    for turn in range(max(map(len, kinds), default=0)):
        yield from (own[turn] for own in kinds if turn < len(own))
