"""Answers between measured numbers of tokens: each shipped race is left out and asked for."""

from dataclasses import replace

import pytest

import ctatune
from ctatune import neighbours, race
from ctatune.config import AnyConfig, Baseline
from ctatune.machine_model import load
from ctatune.neighbours import decide
from ctatune.problem import Problem
from ctatune.seed import shipped, shipped_shapes
from ctatune.space import default_config

MACHINE = load()
WEIGHTS = Problem(m=1, k=8192, h=8192, n=8192, gpus=2)
ROWS = [
    row
    for shape in shipped_shapes()
    for row in shipped(shape)
    if replace(row.problem, m=1) == WEIGHTS
]
TOKENS = sorted({row.problem.m for row in ROWS})


def without(*left_out: int) -> list:
    return [row for row in ROWS if row.problem.m not in left_out]


@pytest.mark.parametrize("m", [m for m in TOKENS if 64 <= m <= 8192])
def test_a_race_left_out_is_met_by_those_beside_it(m, monkeypatch):
    monkeypatch.setattr(neighbours, "WIDEST", 8.0)  # what is left is a factor of 4 to 8 apart
    real = {r.config: r.measurement.latency_us for r in race.newest([*without(*set(TOKENS) - {m})])}
    fastest_us = min(us for c, us in real.items() if c.method != "rowsplit" and us)
    found = decide(replace(WEIGHTS, m=m), without(m), MACHINE, set())
    assert found is not None
    assert found.config.method == "cta"
    assert found.prediction.latency_us == pytest.approx(fastest_us, rel=0.06)
    for method in ("single", "tp_twoshot"):
        measured_us = min(us for c, us in real.items() if c.method == method and us)
        assert found.baselines[method] == pytest.approx(measured_us, rel=0.1)


def test_nothing_is_said_far_from_what_was_measured():
    largest = max(TOKENS)
    near, far = (replace(WEIGHTS, m=m) for m in (2 * largest, 2 * largest + 1))
    assert decide(near, ROWS, MACHINE, set()) is not None
    assert decide(far, ROWS, MACHINE, set()) is None
    assert decide(replace(WEIGHTS, m=256), without(64, 128, 256, 512), MACHINE, set()) is None
    assert decide(replace(WEIGHTS, m=256), [], MACHINE, set()) is None


def test_what_cannot_run_or_failed_gives_way():
    odd = replace(WEIGHTS, m=3 * 1024 + 1)  # 25 tile rows: no pairs for multicast
    found = decide(odd, ROWS, MACHINE, set())
    assert found is not None
    assert found.config == default_config(odd)
    failed: set[AnyConfig] = {row.config for row in ROWS if row.config.method == "cta"}
    failed.add(default_config(odd))
    found = decide(odd, ROWS, MACHINE, failed)
    assert found is not None
    assert isinstance(found.config, Baseline)


def test_races_of_baselines_alone_say_nothing():
    baselines = [row for row in ROWS if row.config.method != "cta"]
    assert decide(replace(WEIGHTS, m=300), baselines, MACHINE, set()) is None


def test_best_says_whose_races_it_leans_on(tmp_path):
    choice = ctatune.best("3000x8192x8192", gpus=2, db=tmp_path / "none.db")
    assert (choice.source, choice.verified) == ("neighbour", False)
    assert "this shape is not measured" in choice.note
    assert "by the races of 2048 and 4096 tokens" in choice.note
    assert choice.interval_us is not None
    assert choice.interval_us[0] < choice.latency_us < choice.interval_us[1]
