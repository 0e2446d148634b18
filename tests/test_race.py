"""The table of a race: paired rounds, ties, the newest run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ctatune import race
from ctatune.config import AnyConfig, Baseline
from ctatune.machine_model import load
from ctatune.problem import Problem
from ctatune.records import Measurement, Phase
from ctatune.rows import Row, Run
from ctatune.space import default_config
from ctatune.stats import median_interval, ratio_interval, verdict

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


def test_the_newest_race_is_one_of_ours_if_there_is_any():
    old = [row(CTA, DRIFT, 1), row(TP, DRIFT, 1)]
    lost = [row(TP, DRIFT, 2)]  # ours timed out
    assert race.newest([*old, *lost]) == race.newest(old)
    assert race.newest(lost) == lost


def test_a_race_is_of_one_number_of_rounds_and_positive_latencies():
    longer = DRIFT + DRIFT
    rows = [row(CTA, DRIFT), row(TP, DRIFT), row(CTA, longer), row(TP, longer)]
    rows = [replace(r, trial=i) for i, r in enumerate(rows)]
    for order in (rows, rows[::-1]):
        lines = race.compare(race.newest(order))
        assert [len(line.row.measurement.samples_us) for line in lines] == [24, 24]
    late = row(CTA, (*DRIFT[1:], -0.2), 2)
    assert race.newest([*rows, late]) == rows[2:]
    for samples in ((), DRIFT[:3], (*DRIFT[1:], 0.0), (*DRIFT[1:], math.nan)):
        with pytest.raises(ValueError, match="positive"):
            ratio_interval(samples, DRIFT if samples else ())


def test_on_one_gpu_single_is_the_baseline():
    alone = replace(PROBLEM, gpus=1)
    slower = tuple(1.5 * us for us in DRIFT)
    rows = [replace(r, problem=alone) for r in (row(CTA, DRIFT), row(SINGLE, slower))]
    ours, single = race.compare(race.newest(rows))
    assert (ours.ratio, single.ratio) == (pytest.approx(2 / 3), 1.0)


def test_energy_is_shown_where_it_was_counted():
    first, second = race.compare([row(CTA, DRIFT, joules=0.98765), row(TP, DRIFT)])
    assert {race.cells(line)[-1] for line in (first, second)} == {"0.988", ""}
    assert {line["energy_j"] for line in race.document([], [first, second])["lines"]} == {
        0.98765,
        None,
    }
    assert "| J |" in race.markdown(PROBLEM, [first, second])
    assert "| J |" not in race.markdown(PROBLEM, race.compare([row(TP, DRIFT)]))


@pytest.mark.parametrize(
    ("ratio", "word"),
    [
        ((0.97, 0.96, 0.98), "faster"),
        ((1.03, 1.02, 1.04), "slower"),
        ((1.03, 0.99, 1.06), "tie"),  # the interval holds 1
        ((1.005, 1.003, 1.02), "tie"),  # less than 1 %
        ((0.995, 0.992, 0.998), "tie"),
        ((1.0, 1.0, 1.0), "tie"),
        ((0.97, 1.01, 1.2), "tie"),  # the interval lies on the other side
    ],
)
def test_a_difference_is_said_when_it_is_sure_and_one_percent(ratio, word):
    assert verdict(*ratio) == word
    swapped = {"faster": "slower", "slower": "faster", "tie": "tie"}[word]
    assert verdict(1 / ratio[0], 1 / ratio[2], 1 / ratio[1]) == swapped


def test_a_control_is_paired_with_the_final_of_its_race_and_is_no_contestant():
    again = tuple(us * 1.02 for us in DRIFT)
    rows = [
        row(CTA, DRIFT, 1),
        row(TP, DRIFT, 1),
        row(CTA, again, 1, phase="control"),
        row(TP, DRIFT, 1, phase="control"),
        row(SINGLE, DRIFT, 1, phase="control"),  # without a final
        row(TP, DRIFT, 2, phase="control"),  # of another run
    ]
    first, second = race.controls(rows)
    assert {pair.config for pair in race.controls(rows[::-1])} == {CTA, TP}
    assert (first.config, first.verdict, second.verdict) == (CTA, "slower", "tie")
    assert first.ratio == pytest.approx(1.02)
    lines = race.compare(race.newest(rows))
    assert len(lines) == 2
    text = race.control_line(rows, lines)
    assert text.startswith(f"\nA/A control: {CTA} 1.020 (1.020 .. 1.020), slower; tp 1.000 (")
    document = race.document(rows, lines)
    assert [(pair["config"], pair["verdict"]) for pair in document["control"]] == [
        *((str(CTA), "slower"), ("tp", "tie"))
    ]
    assert race.control_line(rows, []) == race.control_line(rows[:2], lines) == ""


def test_people_see_the_best_variant_of_a_method_and_all_of_ours():
    other = replace(CTA, mix=0.5)
    slower = tuple(2 * us for us in DRIFT)
    rows = [row(TP, slower), row(Baseline(method="tp", nccl="ring/ll"), DRIFT)]
    rows += [row(CTA, DRIFT), row(other, slower)]
    assert [str(line.row.config) for line in race.shown(race.compare(rows))] == [
        *("tp nccl ring/ll", str(CTA), str(other))
    ]


def test_each_size_of_the_weights_is_plotted_on_its_own(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, _: drawn.extend(self.axes))
    lines = race.compare([row(CTA, DRIFT), row(TP, DRIFT), row(SINGLE, DRIFT)])
    wide = replace(PROBLEM, h=28672)
    race.plot({PROBLEM: lines, replace(PROBLEM, m=64): lines, wide: lines}, tmp_path / "a.png")
    assert [axes.get_title() for axes in drawn] == [
        *("k 8192 h 8192 n 8192", "k 8192 h 28672 n 8192")
    ]
    assert [len(line.get_xdata()) for axes in drawn for line in axes.lines] == [2] * 3 + [1] * 3
    assert len({line.get_color() for line in drawn[0].lines}) == 3
    race.plot({}, tmp_path / "a.png")  # nothing was ever raced
