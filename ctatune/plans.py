"""Which config an `Mlp` runs for a number of tokens, and how that is known.

Weights are placed once and serve every number of tokens, so each config must fit the one division
of them: its tiles must end where the part of a GPU ends (a tile that sticks out would write over
the columns of the next GPU), and its mix and the axis of `down` must be those of the division.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from ctatune import answers
from ctatune.choice import Choice, failed_in
from ctatune.config import AnyConfig, Config, DownAxis
from ctatune.errors import NoAnswer, UsageError
from ctatune.known import machine_of, stored_rows, tokens_of_ours
from ctatune.latency import estimate
from ctatune.layout import pitch
from ctatune.limits import default_split, why_invalid
from ctatune.problem import Problem
from ctatune.records import Source
from ctatune.rows import Row
from ctatune.schedule import Columns, layer_columns, split_columns, w_down_held
from ctatune.space import candidates, default_config, fitted

UNIT = 256  # columns: 160, 192 and 224 alone, of the widths of tiles, do not divide it
MARGIN = 1.05  # what a race may find more than a screening
PREDICTED = 4  # configs that are taken from the estimate where the answer does not fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The config for a number of tokens. `source` says how it was chosen: `measured` for exactly
    so many tokens, `neighbour` by a measurement of others, `simulated`, or `predicted`."""

    config: Config
    source: Source
    note: str


def bucket(m: int) -> int:
    """The tokens that stand for m: the next power of two, where most measurements are."""
    return 1 << (m - 1).bit_length()


_Rated = tuple[float, Plan]  # with the microseconds that it may take at most


class _Way(NamedTuple):
    """What all configs of one division have in common."""

    mix: float
    stage_split: tuple[int, int]
    down_axis: DownAxis


class Plans:
    """Plans of one pair of weights (`problem` has the most tokens), divided over its GPUs as the
    config of `choice` divides them, or else evenly in multiples of UNIT columns."""

    def __init__(
        self, problem: Problem, choice: Choice | None, db: Path | None, platform: str | None
    ) -> None:
        self._problem, self._choice, self._db = problem, choice, Path(db) if db else None
        self._platform = platform or (choice.platform if choice else None)
        # By tokens, and what failed there.
        self._of_tokens: dict[int, tuple[list[Plan], set[AnyConfig]]] = {}
        self._measured: set[int] | None = None  # tokens of which our kernel was measured
        self._warned = False
        given = choice.config if choice else None
        if isinstance(given, Config):
            self._way = _Way(given.mix, given.stage_split, given.down_axis)
            self.division = layer_columns(problem, given)
        else:
            even = [1 / problem.gpus] * problem.gpus
            outputs = (layer.outputs for layer in problem.layers)
            self.division = tuple(split_columns(count, UNIT, even) for count in outputs)
            axis = default_config(problem).down_axis  # h only where each GPU has columns of up
            self._way = _Way(1.0, default_split(problem.gpus), axis)

    @property
    def sums_over_gpus(self) -> bool:
        """Whether W_down is divided along h, and Y2 summed over GPUs."""
        return self._way.down_axis == "h"

    @property
    def y1_width(self) -> int:
        """Columns of the memory of Y1 that suffice for every config that fits."""
        if not self.sums_over_gpus:
            return pitch(self._problem.h)
        ups, downs = self.division
        partial = max(own.width for own in downs) + UNIT  # in whole tiles
        return self._problem.h + UNIT + sum(own.width > 0 for own in ups) * partial

    def w_down_held(self, gpu: int) -> tuple[Columns, Columns]:
        """Rows and columns of W_down that a GPU holds."""
        return w_down_held(self._problem, self.division, self._way.down_axis, gpu)

    def of(self, m: int) -> Plan:
        """The plan for m tokens; warns once, of the first that is not measured.

        Raises: UsageError when no config can run.
        """
        problem = replace(self._problem, m=m)
        plan = next(self._able(problem), None)
        if plan is None:
            reason = why_invalid(default_config(problem), problem) or "no tile fits the division"
            raise UsageError(f"no config can run {problem.shape}: {reason}")
        if plan.source != "measured" and not self._warned:
            self._warned = True
            warnings.warn(f"{problem.shape}: {plan.source}, {plan.note}", stacklevel=2)
        return plan

    def _able(self, problem: Problem) -> Iterator[Plan]:
        """Plans that can run, the best first; those that take long to find come last."""
        m = problem.m if self._is_known(problem) else bucket(problem.m)
        if m not in self._of_tokens:
            self._of_tokens[m] = self._looked_up(replace(problem, m=m))
        plans, failed = self._of_tokens[m]
        for plan in plans:
            moved = plan if m == problem.m else _for_others(plan, m, problem.m)
            # Tiles that go in pairs need an even number of tile rows: the same tiles without.
            for config in (moved.config, replace(moved.config, multicast=False)):
                if config not in failed and self._can_run(problem, config):
                    yield replace(moved, config=config)
        for default in chain([default_config(problem)], candidates(problem)):
            config = replace(default, **self._way._asdict())
            if config not in failed and self._can_run(problem, config):
                yield Plan(config=config, source="predicted", note="a default of the search space")

    def _is_known(self, problem: Problem) -> bool:
        """Whether the caller has chosen, or somebody measured, just so many tokens."""
        if self._measured is None:
            self._measured = tokens_of_ours(self._problem, self._db, self._platform)
        chosen = self._choice is not None and self._choice.shape == problem.shape
        return chosen or problem.m in self._measured

    def _can_run(self, problem: Problem, config: Config) -> bool:
        return self._fits(config) and why_invalid(config, problem) is None

    def _fits(self, config: Config) -> bool:
        """Whether a config divides the weights as they are divided."""
        if (config.mix, config.stage_split, config.down_axis) != self._way:
            return False
        for own, layer, tile in zip(self.division, self._problem.layers, config.tiles, strict=True):
            if any(part.stop % tile.n and part.stop != layer.outputs for part in own):
                return False
        return True

    def _looked_up(self, problem: Problem) -> tuple[list[Plan], set[AnyConfig]]:
        """What is known for a problem, and what failed there, unless the caller has chosen it."""
        rows = stored_rows(problem, self._db, self._platform).rows
        failed = failed_in(rows) - ({self._choice.config} if self._choice else set())
        found, answer = self._measured_plans(rows, failed), self._answer(problem)
        first = []
        if answer and answer.config not in failed and self._fits(answer.config):
            first.append(answer)
        else:
            found += self._predicted_plans(problem, failed)
        return [*first, *(plan for _, plan in sorted(found, key=itemgetter(0)))], failed

    def _answer(self, problem: Problem) -> Plan | None:
        """The caller's choice, or the best of our kernel."""
        choice = self._choice
        if not (choice and choice.shape == problem.shape and isinstance(choice.config, Config)):
            try:
                choice = answers.best(
                    problem.shape,
                    gpus=problem.gpus,
                    db=self._db,
                    platform=self._platform,
                    ours=True,
                )
            except NoAnswer:
                return None
        assert isinstance(choice.config, Config)
        return Plan(config=choice.config, source=choice.source, note=choice.note)

    def _measured_plans(self, rows: Sequence[Row], failed: set[AnyConfig]) -> list[_Rated]:
        """Our configs that were measured, fit and did not fail: as they raced last, else as they
        were screened last."""
        found: dict[Config, _Rated] = {}
        newest = sorted(rows, key=lambda row: row.age, reverse=True)
        for row in sorted(newest, key=lambda row: row.measurement.phase != "final"):
            config, latency_us = row.config, row.measurement.latency_us
            if not (row.good and latency_us and isinstance(config, Config)) or config in failed:
                continue
            plan = Plan(config=config, source="measured", note=f"measured at {latency_us:.1f} us")
            most_us = latency_us * (1.0 if row.measurement.phase == "final" else MARGIN)
            if self._fits(config):
                found.setdefault(config, (most_us, plan))
        return list(found.values())

    def _predicted_plans(self, problem: Problem, failed: set[AnyConfig]) -> list[_Rated]:
        """The best by estimate of those that fit."""
        try:
            machine = machine_of(problem, self._db, self._platform)
        except UsageError:  # there is no model of this platform
            return []
        able = [c for c in candidates(problem) if c not in failed and self._fits(c)]
        rated = [(estimate(problem, config, machine), config) for config in able]
        rated.sort(key=lambda pair: pair[0].latency_us)
        return [
            (
                expected.interval_us[1],
                Plan(
                    config=config,
                    source="predicted",
                    note=f"estimated at {expected.latency_us:.1f} us",
                ),
            )
            for expected, config in rated[:PREDICTED]
        ]


def _for_others(plan: Plan, m: int, tokens: int) -> Plan:
    """The plan of m tokens for another number of them."""
    source: Source = "neighbour" if plan.source == "measured" else plan.source
    note = "; ".join(filter(None, [f"as {m} tokens", plan.note]))
    return Plan(config=fitted(plan.config, m, tokens), source=source, note=note)
