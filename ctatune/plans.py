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
from pathlib import Path
from typing import NamedTuple

from ctatune import answers
from ctatune.choice import Choice, failed_in
from ctatune.config import AnyConfig, Config, DownAxis
from ctatune.errors import NoAnswer, UsageError
from ctatune.known import stored_rows
from ctatune.layout import pitch
from ctatune.limits import default_split, why_invalid
from ctatune.problem import Problem
from ctatune.records import Source
from ctatune.rows import Row
from ctatune.schedule import Columns, layer_columns, split_columns, w_down_held
from ctatune.space import candidates, default_config

UNIT = 256  # columns: 160, 192 and 224 alone, of the widths of tiles, do not divide it


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
        self._problem, self._choice, self._db = problem, choice, db
        self._platform = platform or (choice.platform if choice else None)
        # By tokens, and what failed there.
        self._of_bucket: dict[int, tuple[list[Plan], set[AnyConfig]]] = {}
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
        m = bucket(problem.m)
        if self._choice and self._choice.shape == problem.shape:
            m = problem.m
        if m not in self._of_bucket:
            self._of_bucket[m] = self._looked_up(replace(problem, m=m))
        plans, failed = self._of_bucket[m]
        for plan in plans:
            moved = plan if m == problem.m else _for_others(plan, m)
            # Tiles that go in pairs need an even number of tile rows: the same tiles without.
            for config in (plan.config, replace(plan.config, multicast=False)):
                if config not in failed and self._fits(problem, config):
                    yield replace(moved, config=config)
        for default in chain([default_config(problem)], candidates(problem)):
            config = replace(default, **self._way._asdict())
            if config not in failed and self._fits(problem, config):
                yield Plan(config=config, source="predicted", note="a default of the search space")

    def _fits(self, problem: Problem, config: Config) -> bool:
        """Whether a config can run on weights that are divided as they are."""
        if (config.mix, config.stage_split, config.down_axis) != self._way:
            return False
        for own, layer, tile in zip(self.division, problem.layers, config.tiles, strict=True):
            if any(part.stop % tile.n and part.stop != layer.outputs for part in own):
                return False
        return why_invalid(config, problem) is None

    def _looked_up(self, problem: Problem) -> tuple[list[Plan], set[AnyConfig]]:
        """What is known for a problem, and what failed there, unless the caller has chosen it."""
        rows = stored_rows(problem, self._db, self._platform).rows
        failed = failed_in(rows) - ({self._choice.config} if self._choice else set())
        return [plan for plan in self._known(problem, rows) if plan.config not in failed], failed

    def _known(self, problem: Problem, rows: Sequence[Row]) -> Iterator[Plan]:
        """The answer for a problem, then our other configs that were measured (`rows`): those that
        raced, then those that were screened, each the fastest first."""
        answer = self._answer(problem)
        instead = ""
        if answer is not None and isinstance(answer.config, Config):
            yield Plan(config=answer.config, source=answer.source, note=answer.note)
        elif answer is not None:
            instead = f"the answer, {answer.config}, is not our kernel; "
        good = [row for row in rows if row.good and isinstance(row.config, Config)]
        good.sort(
            key=lambda row: (row.measurement.phase != "final", row.measurement.latency_us or 0.0)
        )
        for row in good:
            assert isinstance(row.config, Config)
            note = f"{instead}measured at {row.measurement.latency_us:.1f} us"
            yield Plan(config=row.config, source="measured", note=note)

    def _answer(self, problem: Problem) -> Choice | None:
        if self._choice and self._choice.shape == problem.shape:
            return self._choice
        try:
            return answers.best(
                problem.shape, gpus=problem.gpus, db=self._db, platform=self._platform
            )
        except NoAnswer:
            return None


def _for_others(plan: Plan, m: int) -> Plan:
    """The plan of m tokens for another number of them."""
    source: Source = "neighbour" if plan.source == "measured" else plan.source
    return replace(plan, source=source, note="; ".join(filter(None, [f"as {m} tokens", plan.note])))
