"""The fit: what it takes, that it finds what data were made with, and what is shipped of it."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from fakes import design_machine

from ctatune import accuracy, fit
from ctatune.config import Baseline
from ctatune.errors import UsageError
from ctatune.fit import Point, is_held_out
from ctatune.machine_model import file_of, load, model_of
from ctatune.problem import Problem
from ctatune.refit import refit
from ctatune.seed import shipped, shipped_shapes
from ctatune.space import default_config, default_pipeline

ROWS = [row for shape in shipped_shapes() for row in shipped(shape)]
DOCUMENT = json.loads(file_of(load().platform.name).read_text())
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
            us = fit.estimated(Point(problem, config, 1.0), machine).latency_us
            found.append(Point(problem, config, us * float(np.exp(noise * draws.normal()))))
    return found


def test_a_fit_finds_the_machine_that_the_data_are_of():
    truth = replace(
        design_machine(), tensor_tflops=700.0, hbm_gbps=4200.0, launch_us=6.0, nccl_us=20.0
    )
    points = made_by(truth, noise=0.01)
    train = [point for point in points if point.problem.k == 8192]
    others = [point for point in points if point.problem.k == 4096]
    fitted = fit.fitted(train, load(), DOCUMENT)
    before = fit.accuracy(others, design_machine(), fit.estimated)
    after = fit.accuracy(others, fitted, fit.estimated)
    assert before.mape > 0.05
    assert after.mape < 0.025
    assert 4.0 < fitted.launch_us < 7.0  # its prior is 3; other rates take a part


def test_one_wild_point_does_not_move_a_fit():
    points = made_by(design_machine())
    wild = points[5]._replace(latency_us=3 * points[5].latency_us)
    fitted = fit.fitted([*points[:5], wild, *points[6:]], load(), DOCUMENT)
    assert fit.accuracy(points, fitted, fit.estimated).mape < 0.02


def test_too_few_points_are_refused():
    with pytest.raises(UsageError, match="a fit needs at least 22 measured configs, got 3"):
        fit.fitted(made_by(load())[:3], load(), DOCUMENT)


def test_doubt_is_what_left_out_shapes_say_and_grows_outside():
    machine = fit.calibrated(made_by(design_machine(), noise=0.05), load(), DOCUMENT)
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


def test_what_is_shipped_says_how_wrong_it_is():
    """The numbers of the file, computed again from what is shipped."""
    about, machine = DOCUMENT["fit"], load()
    assert about["sha256_of_points"] == accuracy.fingerprint(fit.points(ROWS))
    assert about["held_out_shapes"] == sorted({point.problem.shape for point in HELD})
    train = [point for point in fit.points(ROWS) if not is_held_out(point.problem)]
    again = accuracy.document(accuracy.held_out(train, HELD, machine))
    for name, errors in again.items():
        assert about["held_out"][name] == pytest.approx(errors, abs=2e-3), name


def test_the_models_beat_a_roofline_where_no_fit_saw_anything():
    errors = DOCUMENT["fit"]["held_out"]
    assert errors["estimate"]["mape"] <= 0.05
    assert errors["estimate"]["p90"] <= 0.12
    assert errors["simulator"]["mape"] <= 0.07
    assert errors["simulator"]["worst"] <= 0.20
    assert errors["estimate"]["mape"] < min(
        errors[name]["mape"] for name in ("roofline", "gradient boosting")
    )


def test_a_written_model_is_read_again(tmp_path):
    out = tmp_path / "model.json"
    found = refit(tmp_path / "none.db", None, out)
    document = json.loads(out.read_text())
    assert model_of(document) == found.machine
    assert document["parameters"]["peak_tflops"] == DOCUMENT["parameters"]["peak_tflops"]
    assert document["fit"]["held_out"]["estimate"]["points"] == len(HELD)
    text = accuracy.table(found.held_out) + accuracy.groups(found.held, found.machine)
    assert "| estimate |" in text
    assert "| method cta |" in text
