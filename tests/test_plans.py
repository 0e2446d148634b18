"""Which config an Mlp runs for a number of tokens, on the shipped measurements and on weights that
nobody measured."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_contract import numpy_case

from ctatune import answers, plans, reference
from ctatune.choice import Choice
from ctatune.config import AnyConfig, Config, Tile
from ctatune.errors import NoAnswer, UsageError
from ctatune.latency import estimate
from ctatune.limits import why_invalid
from ctatune.machine_model import load
from ctatune.plans import Plans, bucket
from ctatune.problem import Problem
from ctatune.schedule import Columns, build
from ctatune.seed import shipped
from ctatune.space import candidates, default_config

NO_DB = Path("/nonexistent/ctatune.db")
WIDE = Problem(m=4096, k=8192, h=8192, n=8192, gpus=2)
TALL = replace(WIDE, h=28672)


def plans_of(problem: Problem, choice: Any = None) -> Plans:
    return Plans(problem, choice, NO_DB, None)


def quiet(found: Plans, m: int) -> plans.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return found.of(m)


def test_buckets_are_powers_of_two():
    numbers = [1, 2, 3, 16, 17, 1000, 1024, 1025, 4096]
    assert [bucket(m) for m in numbers] == [1, 2, 4, 16, 32, 1024, 1024, 2048, 4096]


def test_measured_tokens_run_what_was_measured():
    found = plans_of(WIDE)
    answer = answers.best("64x8192x8192", gpus=2, db=NO_DB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = found.of(64)
    assert (plan.config, plan.source) == (answer.config, "measured")


def test_what_failed_is_not_run(monkeypatch):
    """Neither what was measured beside it nor a default, and other tiles are found."""
    first = quiet(plans_of(WIDE), 64).config
    monkeypatch.setattr(plans, "failed_in", lambda _: {first, default_config(replace(WIDE, m=64))})
    second = quiet(plans_of(WIDE), 64).config
    assert second not in (first, default_config(replace(WIDE, m=64)))
    answer = answers.best("64x8192x8192", gpus=2, db=NO_DB)
    given = replace(answer, config=first)
    assert quiet(plans_of(WIDE, given), 64).config == first  # whoever asks for it gets it


def test_other_tokens_run_the_next_power_of_two_and_say_so_once():
    found = plans_of(WIDE)
    with pytest.warns(UserWarning, match="60x8192x8192x8192: neighbour, as 64 tokens"):
        plan = found.of(60)
    assert (plan.config, plan.source) == (found.of(64).config, "neighbour")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.of(61)


def test_pairs_of_tile_rows_are_given_up_where_there_is_an_odd_number():
    found = plans_of(WIDE)
    paired, single = quiet(found, 4096).config, quiet(found, 4096 - 128).config
    assert paired.multicast
    assert single == replace(paired, multicast=False)
    assert quiet(found, 4096 - 256).config == paired


def test_one_division_serves_all_tokens():
    """Of every m, the tiles of the plan cover the parts of each GPU and nothing else."""
    for problem in (WIDE, replace(WIDE, k=4096, h=14336, n=4096)):
        found = plans_of(problem)
        for part, layer in zip(found.division, problem.layers, strict=True):
            assert part[0] == Columns(0, layer.outputs // 2)
        for m in (1, 17, 100, 128, 200, 513, 1000, 2048, 3001, 4096):
            config, real = quiet(found, m).config, replace(problem, m=m)
            assert why_invalid(config, real) is None
            for own, layer, tile in zip(found.division, real.layers, config.tiles, strict=True):
                edges = {part.stop for part in own} - {layer.outputs}
                assert not any(edge % tile.n for edge in edges)


@pytest.mark.parametrize("m", [16, 1024])
def test_w_down_is_divided_along_h_where_y1_is_much_larger_than_y2(m):
    rows = [row for row in shipped(f"{m}x8192x28672x8192") if row.good and row.problem.gpus == 2]
    configs = [row.config for row in rows if isinstance(row.config, Config)]
    measured = any(config.down_axis == "h" for config in configs)
    plan = quiet(plans_of(TALL), m)
    assert plan.config.down_axis == "h"
    assert plan.source == ("measured" if measured else "predicted")


def best_is(monkeypatch: Any, m: int, config: AnyConfig) -> Choice:
    """Makes a config the answer for TALL with m tokens; gives it."""
    best, shape = answers.best, replace(TALL, m=m).shape
    answer = replace(best(shape, gpus=2, db=NO_DB), config=config)
    monkeypatch.setattr(answers, "best", lambda s, **of: answer if s == shape else best(s, **of))
    return answer


def by_columns() -> Any:
    """A choice for 64 tokens that divides both weights of TALL evenly by their columns."""
    problem = replace(TALL, m=64)
    config = replace(default_config(problem), down_axis="n")
    return SimpleNamespace(shape=problem.shape, config=config, platform=None)


def test_what_the_division_excludes_is_replaced_by_another_measured_config(monkeypatch):
    """No tile of 192 columns ends at 14336."""
    up, down = Tile(m=128, n=192, group_m=8), Tile(m=128, n=256, group_m=4)
    config = Config(up=up, down=down, stages=4, d_slabs=4, mix=1.0, pace_us=8.0, multicast=True)
    answer = best_is(monkeypatch, 1024, config)
    plan = quiet(plans_of(TALL, by_columns()), 1024)
    assert plan.source == "measured"
    assert "measured at" in plan.note
    assert all(tile.n in (64, 128, 256) for tile in plan.config.tiles)
    given = plans_of(TALL, answer)
    assert quiet(given, 1024).config == config
    assert quiet(given, 64).config.up.n == 64  # 14400 columns of up on GPU 0


def test_our_kernel_runs_where_a_baseline_is_the_answer():
    problem = replace(WIDE, m=512, k=4096, h=14336, n=4096)
    assert answers.best(problem.shape, gpus=2, db=NO_DB).method == "tp_twoshot"
    ours = answers.best(problem.shape, gpus=2, db=NO_DB, ours=True)
    small = replace(problem, m=64)
    columns = replace(default_config(small), down_axis="n")
    plan = quiet(
        plans_of(problem, SimpleNamespace(shape=small.shape, config=columns, platform=None)), 512
    )
    assert (plan.config, plan.source) == (ours.config, "measured")


def test_tokens_that_were_measured_stand_for_themselves():
    """48 tokens are not taken as 64 where both were measured."""
    problem = replace(WIDE, k=4096, h=4096, n=4096)
    ours = answers.best("48x4096x4096", gpus=2, db=NO_DB, ours=True)
    found = plans_of(problem)
    plan = quiet(found, 48)
    assert (plan.config, plan.source) == (ours.config, "measured")
    assert quiet(found, 47).note.startswith("as 64 tokens")


PIPELINE = SimpleNamespace(
    shape="64x4096x11008x4096",
    config=replace(default_config(Problem.of("64x4096x11008", gpus=2)), mix=0.0, down_axis="n"),
    platform=None,
)


@pytest.mark.parametrize(
    ("gpus", "shape", "choice"),
    [
        (4, "1024x8192x8192", None),
        (2, "1024x4096x11008", None),
        (2, "512x4096x11008", PIPELINE),
    ],
)
def test_where_the_answer_does_not_fit_the_best_that_does_runs(gpus, shape, choice):
    problem = Problem.of(shape, gpus=gpus)
    found = plans_of(replace(problem, m=4096), choice)
    machine = load().for_gpus(gpus)
    estimates = {
        config: estimate(problem, config, machine).latency_us
        for config in candidates(problem)
        if found._fits(config)
    }
    plan = quiet(found, problem.m)
    assert plan.source == "predicted"
    assert estimates[plan.config] == min(estimates.values())


CHOICE = SimpleNamespace(
    shape="300x128x768x520",
    config=Config(up=Tile(m=128, n=192), down=Tile(m=128, n=64), stages=4, d_slabs=3, mix=0.5),
    source="measured",
    platform="h200",
    note="",
)


@pytest.fixture
def nothing_known(monkeypatch):
    def best(*_: Any, **__: Any) -> Any:
        raise NoAnswer("nothing")

    monkeypatch.setattr(answers, "best", best)


@pytest.mark.usefixtures("nothing_known")
def test_a_choice_divides_the_weights_and_sets_the_mix():
    problem = Problem(m=512, k=128, h=768, n=520, gpus=2)
    found = plans_of(problem, CHOICE)
    assert found.division[0] == (Columns(0, 576), Columns(576, 768))
    assert quiet(found, 300).config == CHOICE.config
    assert quiet(found, 300).source == "measured"
    other = quiet(found, 64)
    assert other.source == "predicted"
    assert (other.config.mix, other.config.stage_split) == (0.5, (1, 1))
    assert other.config.up.n in (64, 192)
    assert other.config.down.n == 64 or found.division[1][0].stop % other.config.down.n == 0


@pytest.mark.usefixtures("nothing_known")
def test_sizes_that_cannot_run_say_why():
    with pytest.raises(UsageError, match="no config can run 64x100x512x512: k must be a multiple"):
        plans_of(Problem(m=512, k=100, h=512, n=512, gpus=2)).of(64)


@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize(("axis", "gpus"), [*product("n", range(1, 5)), *product("h", range(1, 4))])
@pytest.mark.parametrize("m", [1, 40, 130, 300])
def test_schedules_of_a_division_compute_y2(monkeypatch, gpus, m, axis):
    """Also where a GPU has no part at all: 712 columns in multiples of 256 over 4 GPUs."""
    problem = Problem(m=m, k=128, h=712, n=520, gpus=gpus)
    default = plans.default_config(problem)
    monkeypatch.setattr(plans, "default_config", lambda _: replace(default, down_axis=axis))
    found = plans_of(problem)
    if axis == "h" and gpus == 1:
        with pytest.raises(UsageError, match="down_axis h needs"):
            quiet(found, m)
        return
    assert quiet(found, m).config.down_axis == axis
    schedule = build(problem, quiet(found, m).config, found.division)
    assert schedule.y1_width <= found.y1_width
    inputs, expected = numpy_case(m, 128, 712, 520)
    for output in reference.execute(schedule, *inputs, ctas=8):
        assert np.linalg.norm(output - expected) <= 0.01 * np.linalg.norm(expected)
