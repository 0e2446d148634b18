"""The fit: what it takes, that it finds what data were made with, and what is shipped of it."""

import json
from dataclasses import replace
from itertools import product
from statistics import fmean

import numpy as np
import pytest
from click.testing import CliRunner
from fakes import design_machine

from ctatune import accuracy, cli, fit
from ctatune.computed import rank
from ctatune.config import Baseline, Config
from ctatune.errors import UsageError
from ctatune.fit import Point, is_held_out
from ctatune.latency import estimate
from ctatune.machine_model import DEFAULT_PLATFORM, document, load, model_of, tile_kind
from ctatune.problem import Problem
from ctatune.refit import refit
from ctatune.seed import shipped_rows
from ctatune.space import candidates, default_config, default_pipeline

ROWS = shipped_rows()
DOCUMENT = document(DEFAULT_PLATFORM)
POINTS = fit.points(ROWS)
HELD = [point for point in POINTS if is_held_out(point.problem)]


def made_by(machine, noise: float = 0.0) -> list[Point]:
    """What a machine would have measured of some shapes."""
    draws = np.random.default_rng(0)
    found = []
    for m, k, gpus in product((1, 64, 256, 1024, 2048, 8192), (4096, 8192), (1, 2)):
        problem = Problem(m=m, k=k, h=8192, n=k, gpus=gpus)
        ours = replace(default_config(problem), down_axis="n")  # for both widths
        configs = [ours, Baseline(method="single")]
        configs += [default_pipeline(problem), Baseline(method="tp")] if gpus > 1 else []
        for config in configs:
            us = estimate(problem, config, machine).latency_us
            found.append(Point(problem, config, us * float(np.exp(noise * draws.normal()))))
    return found


def test_a_fit_finds_the_machine_that_the_data_are_of():
    truth = replace(
        design_machine(), tensor_tflops=700.0, hbm_gbps=4200.0, launch_us=6.0, nccl_us=20.0
    )
    points = made_by(truth, noise=0.01)
    train = [point for point in points if point.problem.k == 8192]
    others = [point for point in points if point.problem.k == 4096]
    fitted = fit.fitted(train, DOCUMENT)
    before = accuracy.accuracy(others, design_machine(), estimate)
    after = accuracy.accuracy(others, fitted, estimate)
    assert before.mape > 0.05
    assert after.mape < 0.025
    assert 5.0 < fitted.launch_us < 7.6  # its prior is 8; other rates take a part


def test_one_wild_point_does_not_move_a_fit():
    points = made_by(design_machine())
    wild = points[5]._replace(latency_us=3 * points[5].latency_us)
    fitted = fit.fitted([*points[:5], wild, *points[6:]], DOCUMENT)
    assert accuracy.accuracy(points, fitted, estimate).mape < 0.02


def test_too_few_points_are_refused():
    rates = sum("prior" in entry for entry in DOCUMENT["parameters"].values())
    assert rates > 20
    with pytest.raises(UsageError, match=f"a fit needs at least {rates} measured configs, got 3"):
        fit.fitted(made_by(load())[:3], DOCUMENT)


def test_doubt_is_what_left_out_shapes_say_and_grows_outside():
    machine = fit.calibrated(made_by(design_machine(), noise=0.05), DOCUMENT)
    assert 0.02 < machine.estimate_log_sigma < 0.12
    covered = Problem(m=64, k=8192, h=8192, n=8192, gpus=2)
    config = default_config(covered)
    assert not machine.outside(covered, config)
    assert machine.doubt(covered, config, 0.1) == 0.1
    outside = replace(covered, gpus=4)
    assert "gpus 1 .. 2" in machine.outside(outside, config)[0]
    assert machine.doubt(outside, config, 0.1) == pytest.approx(0.3)


def test_doubt_grows_for_tiles_that_were_measured_on_one_gpu_alone():
    machine, problem = load(), Problem(m=200, k=8192, h=8192, n=8192, gpus=2)
    several = [point.config for point in fit.points(ROWS) if point.problem.gpus > 1]
    assert set(machine.linked) <= {tile_kind(c) for c in several if isinstance(c, Config)}
    new = next(c for c in candidates(problem) if tile_kind(c) not in machine.linked)
    assert "measured on one GPU at most" in machine.outside(problem, new)[0]
    assert machine.doubt(problem, new, 0.1) == pytest.approx(0.3)
    alone = replace(new, stage_split=(1, 0))
    assert not machine.outside(replace(problem, gpus=1), alone)


def test_points_are_the_newest_screenings_of_today():
    points = fit.points(ROWS)
    assert len({(point.problem, point.config) for point in points}) == len(points)
    single = Baseline(method="single")
    problem = next(p.problem for p in points if p.config == single and p.problem.m == 64)
    screened = [row for row in ROWS if row.problem == problem and row.config.method == "single"]
    variants = [
        row.measurement.latency_us
        for row in screened
        if row.of_this_protocol and row.measurement.phase == "screen"
    ]
    assert Point(problem, single, min(us for us in variants if us)) in points
    assert not fit.points(replace(row, protocol=0) for row in ROWS)
    assert not fit.points(row for row in ROWS if row.measurement.phase != "screen")


def test_regret_is_what_the_first_of_the_ranking_takes_more(monkeypatch):
    """Measured: the reverse of what the model says, but for the third of its ranking."""
    machine, problem = load(), Problem(m=64, k=4096, h=4096, n=4096, gpus=2)
    ranked = rank(problem, machine)
    measured = {config: 200.0 - i for i, config in enumerate(ranked)}
    measured[ranked[2]] = 100.0
    points = [Point(problem, config, us) for config, us in measured.items()]
    (found,) = accuracy.regrets(points, machine)  # the whole space
    assert (found.configs, found.first, found.best) == (len(ranked), 1.0, 0.0)
    less = [point for point in points if point.config not in (ranked[0], ranked[2])]
    assert accuracy.regrets(less, machine) == []
    monkeypatch.setattr(accuracy, "EXPLORED", 1)
    assert accuracy.regrets(less[:49], machine) == []
    (found,) = accuracy.regrets(less, machine)  # the first of those that were measured
    assert found.first == pytest.approx(199.0 / (201.0 - len(ranked)) - 1.0, abs=1e-6)
    assert "64x4096x4096x4096 on 2 GPUs" in accuracy.regret_table([found])


def test_outside_is_two_to_four_times_beyond_in_one_size():
    inner, outer = fit.beyond(POINTS, "m", 1024)
    assert {point.problem.m for point in outer} == {2048, 3000, 4096}
    assert max(point.problem.m for point in inner) == 1024
    inner, outer = fit.beyond(POINTS, "k", 4096)
    assert {point.problem.k for point in outer} == {8192}
    assert max(point.problem.h for point in outer) <= max(point.problem.h for point in inner)


def test_the_shipped_model_is_of_the_shipped_rows():
    assert DOCUMENT["fit"]["sha256_of_points"] == accuracy.fingerprint(POINTS)
    assert sorted({point.problem.shape for point in HELD}) == DOCUMENT["fit"]["held_out_shapes"]


def test_the_models_beat_their_opponents_where_no_fit_saw_anything():
    errors = DOCUMENT["fit"]["held_out"]
    assert errors["estimate, 2 GPUs"]["mape"] <= 0.05
    assert errors["estimate"]["mape"] <= 0.05
    assert errors["estimate"]["p90"] <= 0.12
    assert errors["simulator"]["mape"] <= 0.07
    # The aim of 0.20 is missed (docs/decisions.md).
    assert errors["simulator, 2 GPUs"]["worst"] <= 0.27
    assert errors["simulator"]["worst"] <= 0.30
    regret = DOCUMENT["fit"]["regret"]
    assert fmean(one["first"] for one in regret) <= 0.05
    assert fmean(one["best"] for one in regret) <= 0.02
    assert all(0.85 <= errors[name]["inside"] <= 0.95 for name in ("estimate", "simulator"))
    opponents = min(errors[name]["mape"] for name in ("roofline", "gradient boosting"))
    assert errors["estimate"]["mape"] < opponents / 2
    for size, limit in fit.LIMITS:
        assert errors[f"estimate, {size} beyond {limit}"]["mape"] <= 0.1


def test_a_file_that_cannot_be_written_is_said_before_the_fit(tmp_path):
    with pytest.raises(UsageError, match="is not there"):
        refit(tmp_path / "none.db", None, tmp_path / "nowhere" / "x.json")


def test_a_fit_is_written_and_told(tmp_path, monkeypatch):
    """All of `ctatune fit` but the search for the rates: errors are those of the shipped file."""
    monkeypatch.setattr(fit, "calibrated", lambda *_: load())
    monkeypatch.setattr(accuracy, "outside", lambda *_: {})
    path = tmp_path / "x.json"
    arguments = ["fit", "--db", str(tmp_path / "none.db"), "--out", str(path)]
    found = CliRunner().invoke(cli.main, arguments, catch_exceptions=False)
    written = json.loads(path.read_text())
    assert model_of(written) == load()
    for name in ("estimate", "simulator", "estimate of baselines"):
        said = DOCUMENT["fit"]["held_out"][name]
        assert written["fit"]["held_out"][name] == pytest.approx(said, abs=1e-3)
    assert written["fit"]["sha256_of_points"] == DOCUMENT["fit"]["sha256_of_points"]
    assert f"fitted to {len(POINTS) - len(HELD)} configs" in found.stdout
    assert "| simulator | " in found.stdout
    assert "| mix 0.25 | " in found.stdout
