"""The fit: what it takes, that it finds what data were made with, and what is shipped of it."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from click.testing import CliRunner
from fakes import design_machine

from ctatune import fit
from ctatune.accuracy import accuracy
from ctatune.cli import main
from ctatune.config import Baseline
from ctatune.errors import UsageError
from ctatune.fit import Point, is_held_out
from ctatune.latency import estimate
from ctatune.machine_model import DEFAULT_PLATFORM, document, load, model_of
from ctatune.problem import Problem
from ctatune.refit import refit
from ctatune.seed import shipped, shipped_rows
from ctatune.space import default_config, default_pipeline

ROWS = shipped_rows()
DOCUMENT = document(DEFAULT_PLATFORM)
HELD = [point for point in fit.points(ROWS) if is_held_out(point.problem)]


def made_by(machine, noise: float = 0.0) -> list[Point]:
    """What a machine would have measured of some shapes."""
    draws = np.random.default_rng(0)
    found = []
    for m, k, gpus in product((1, 64, 256, 1024, 2048, 8192), (4096, 8192), (1, 2)):
        problem = Problem(m=m, k=k, h=8192, n=k, gpus=gpus)
        configs = [default_config(problem), Baseline(method="single")]
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
    before = accuracy(others, design_machine(), estimate)
    after = accuracy(others, fitted, estimate)
    assert before.mape > 0.05
    assert after.mape < 0.025
    assert 4.0 < fitted.launch_us < 7.0  # its prior is 3; other rates take a part


def test_one_wild_point_does_not_move_a_fit():
    points = made_by(design_machine())
    wild = points[5]._replace(latency_us=3 * points[5].latency_us)
    fitted = fit.fitted([*points[:5], wild, *points[6:]], DOCUMENT)
    assert accuracy(points, fitted, estimate).mape < 0.02


def test_too_few_points_are_refused():
    with pytest.raises(UsageError, match=r"a fit needs at least \d+ measured configs, got 3"):
        fit.fitted(made_by(load())[:3], DOCUMENT)


def test_doubt_is_what_left_out_shapes_say_and_grows_outside():
    machine = fit.calibrated(made_by(design_machine(), noise=0.05), DOCUMENT)
    assert 0.02 < machine.estimate_log_sigma < 0.12
    assert machine.covers(Problem(m=100, k=8192, h=8192, n=8192, gpus=2))
    outside = Problem(m=100, k=8192, h=8192, n=8192, gpus=4)
    assert not machine.covers(outside)
    assert machine.doubt(outside, 0.1) == pytest.approx(0.3)


def test_points_are_the_newest_finals_of_today():
    points = fit.points(ROWS)
    assert len({(point.problem, point.config) for point in points}) == len(points)
    single = Baseline(method="single")
    problem = next(p.problem for p in points if p.config == single and p.problem.m == 64)
    variants = [
        row.measurement.latency_us
        for row in shipped(problem.shape)
        if row.problem == problem and row.config.method == "single"
        if row.measurement.phase == "final"
    ]
    assert Point(problem, single, min(us for us in variants if us)) in points
    assert not fit.points(replace(row, protocol=0) for row in ROWS)
    screens = [row for row in ROWS if row.measurement.phase == "screen"]
    assert screens
    assert not fit.points(screens)


def test_the_models_beat_a_roofline_where_no_fit_saw_anything():
    errors = DOCUMENT["fit"]["held_out"]
    assert errors["estimate"]["mape"] <= 0.06
    assert errors["estimate"]["p90"] <= 0.12
    assert errors["simulator"]["mape"] <= 0.07
    assert errors["simulator"]["worst"] <= 0.20
    assert errors["estimate"]["mape"] < min(
        errors[name]["mape"] for name in ("roofline", "gradient boosting")
    )


def test_what_is_shipped_comes_out_of_what_is_shipped(tmp_path):
    """The command writes the shipped file again, and it says how wrong it is."""
    out = tmp_path / "model.json"
    command = ["fit", "--db", str(tmp_path / "none.db"), "--out", str(out)]
    result = CliRunner().invoke(main, command, catch_exceptions=False)
    again = json.loads(out.read_text())
    for name, entry in DOCUMENT["parameters"].items():
        assert again["parameters"][name]["value"] == pytest.approx(entry["value"], rel=0.02), name
    for name, errors in again["fit"].pop("held_out").items():
        assert DOCUMENT["fit"]["held_out"][name] == pytest.approx(errors, abs=3e-3), name
    assert again["fit"].items() <= DOCUMENT["fit"].items()
    assert model_of(again).platform == load().platform
    assert "| estimate |" in result.output
    assert "| method cta |" in result.output


def test_a_file_that_cannot_be_written_is_said_before_the_fit(tmp_path):
    with pytest.raises(UsageError, match="is not there"):
        refit(tmp_path / "none.db", None, tmp_path / "nowhere" / "x.json")
