"""The table of a race: paired rounds, ties, the newest run."""

from __future__ import annotations

import pytest

from ctatune import race
from ctatune.config import AnyConfig, Baseline
from ctatune.machine_model import load
from ctatune.problem import Problem
from ctatune.records import Measurement, Phase
from ctatune.rows import Row, Run
from ctatune.space import default_config
from ctatune.stats import median_interval, ratio_interval

PROBLEM = Problem(m=1024, k=8192, h=8192, n=8192, gpus=2)
CTA = default_config(PROBLEM)
TP, SINGLE = Baseline(method="tp"), Baseline(method="single")


def row(
    config: AnyConfig,
    samples: tuple[float, ...],
    run_id: int = 1,
    phase: Phase = "final",
    **gpu_state: object,
) -> Row:
    run = Run(
        id=run_id,
        utc=f"2026-11-3{run_id}",
        command="",
        compiler="",
        versions={},
        platform=load().platform,
    )
    middle, low, high = median_interval(samples)
    measured = Measurement(
        outcome="ok",
        phase=phase,
        latency_us=middle,
        interval_us=(low, high),
        samples_us=samples,
        gpu_state=gpu_state,
    )
    return Row(
        id=0,
        trial=1,
        utc="",
        protocol=1,
        run=run,
        problem=PROBLEM,
        config=config,
        measurement=measured,
    )


DRIFT = tuple(100.0 + 3 * i for i in range(12))  # the machine gets warm in the course of the race


def test_ratios_are_of_the_same_round_so_a_drift_does_not_hide_a_difference():
    ours = tuple(us * 0.97 for us in DRIFT)
    ratio, low, high = ratio_interval(ours, DRIFT)
    assert (ratio, low, high) == pytest.approx((0.97, 0.97, 0.97))
    first, second, _ = race.compare(
        [row(CTA, ours), row(TP, DRIFT), row(SINGLE, tuple(2 * us for us in DRIFT))]
    )
    assert (first.row.config, first.tie) == (CTA, False)
    assert (second.ratio, second.ideal) == (1.0, 1.0)


def test_a_difference_inside_the_interval_is_a_tie():
    noisy = tuple(us * (1.02 if i % 2 else 0.985) for i, us in enumerate(DRIFT))
    lines = {line.row.config: line for line in race.compare([row(CTA, noisy), row(TP, DRIFT)])}
    assert lines[CTA].tie
    assert "(tie)" in race.cells(lines[CTA])[3]
    assert "tie" not in race.cells(lines[TP])[3]
    assert lines[CTA].ideal is None  # nobody raced on one GPU


def test_the_newest_run_with_rivals_is_shown():
    rows = [
        row(CTA, DRIFT, 0),
        row(TP, DRIFT, 0),
        row(CTA, DRIFT, 1),
        row(TP, DRIFT, 1),
        row(TP, DRIFT, 1, phase="screen"),
        row(CTA, DRIFT, 2),
        row(SINGLE, DRIFT, 2),
    ]
    assert [r.run_id for r in race.newest(rows)] == [1, 1]
    assert [r.run_id for r in race.newest(rows[-2:])] == [2, 2]
    assert race.newest([]) == []
    assert race.compare([]) == []


def test_energy_is_shown_where_it_was_counted():
    first, second = race.compare([row(CTA, DRIFT, energy_j=0.98765), row(TP, DRIFT)])
    assert {race.cells(line)[-1] for line in (first, second)} == {"0.988", ""}
    assert {line["energy_j"] for line in race.document([first, second])} == {0.98765, None}
    assert "| J |" in race.markdown(PROBLEM, [first, second])
    assert "| J |" not in race.markdown(PROBLEM, race.compare([row(TP, DRIFT)]))
