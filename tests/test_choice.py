"""What may be an answer, what never may, and that each miss is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_seed import BUILD, CONFIG, GOOD, PROBLEM, PROOF, begin

import ctatune.choice
import ctatune.seed
from ctatune import jit, known, latency, limits, machine_model, records, space
from ctatune.baseline_latency import modelled
from ctatune.choice import Choice
from ctatune.config import AnyConfig, Baseline, parse_config
from ctatune.errors import NoAnswer, StoreError, UsageError
from ctatune.problem import Problem
from ctatune.records import RACING, SCREENING, Measurement, Prediction, Regime
from ctatune.seed import export_lines, forget_shipped
from ctatune.simulate import SIMULATOR
from ctatune.store import Store

MACHINE = machine_model.load(None)
HERE = MACHINE.platform
OTHER = replace(CONFIG, mix=0.5)
BURST = Regime(load="burst")
OLD = replace(GOOD, kernel=replace(BUILD, hash="0ld"))


def measured(latency_us: float = 100.0, **changes: Any) -> Measurement:
    build = replace(BUILD, hash=jit.kernel_hash())
    timed = replace(GOOD, kernel=build, latency_us=latency_us, samples_us=(latency_us,) * 5)
    return replace(timed, **changes)


def final(latency_us: float, **changes: Any) -> Measurement:
    return measured(latency_us, phase="final", **changes)


def single(latency_us: float, **changes: Any) -> Measurement:
    return replace(measured(latency_us, **changes), kernel=None)


@pytest.fixture(autouse=True)
def no_shipped_rows(monkeypatch):
    monkeypatch.setattr(ctatune.choice, "shipped", lambda _: ())


@pytest.fixture(autouse=True)
def db(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CTATUNE_DB", str(tmp_path / "a.db"))
    return tmp_path / "a.db"


def run(
    db: Path,
    *trials: tuple[AnyConfig, Measurement],
    problem=PROBLEM,
    platform=HERE,
    kernel: str | None = None,
    utc: str = "",
) -> None:
    with Store.open(db) as store:
        versions = {"kernel": kernel or jit.kernel_hash()}
        run_id = store.begin_run(platform, command="", compiler="", versions=versions)
        if utc:
            store._db.execute("UPDATE run SET utc = ? WHERE id = ?", [utc, run_id])
        for config, measurement in trials:
            store.add_measurement(run_id, problem, config, measurement)


def best(shape: str = PROBLEM.shape, gpus: int = 2, **asked: Any) -> Choice:
    where = asked.pop("db", None), asked.pop("platform", None)
    ours = asked.pop("ours", False)
    return ctatune.choice.choose(Problem.of(shape, gpus=gpus, **asked), *where, ours=ours)


def simulate(
    db: Path, latency_us: float, config: AnyConfig = OTHER, model: str = SIMULATOR
) -> None:
    interval_us = (latency_us / 2, latency_us * 2)
    prediction = Prediction(latency_us=latency_us, interval_us=interval_us, model=model)
    with Store.open(db) as store:
        store.add_prediction(begin(store, HERE), PROBLEM, config, prediction)


def test_the_fastest_measured_config_is_the_answer(db):
    run(db, (CONFIG, measured(120.0)), (OTHER, measured(110.0)), (Baseline(), single(150.0)))
    choice = best()
    assert (choice.config, choice.latency_us, choice.interval_us) == (OTHER, 110.0, (99.0, 101.0))
    assert (choice.source, choice.verified, choice.method) == ("measured", True, "cta")
    assert (choice.baselines, choice.platform) == ({"single": 150.0}, HERE.name)
    assert choice.evidence["phase"] == "screen"
    assert choice.evidence["rounds"] == 5
    assert choice.evidence["kernel"] == jit.kernel_hash()
    assert choice.evidence["driver"] == HERE.driver
    written = json.loads(json.dumps(choice.to_json()))
    assert parse_config(json.dumps(written["config"])) == OTHER
    assert written["config"]["ctas"] == 0  # whole, with what is default
    assert written.keys() >= {
        *("shape", "dtype", "activation", "gpus", "output", "platform", "method", "config"),
        *("latency_us", "interval_us", "source", "verified", "baselines"),
    }


def test_single_and_copies_of_weights_are_listed_and_never_the_answer(db):
    others = (Baseline(method="single"), Baseline(method="rowsplit"))
    run(db, *((config, single(1.0)) for config in others))
    assert (best().method, best().source) == ("cta", "predicted")
    assert "only baselines are measured" in best().note
    run(db, (CONFIG, measured(120.0)))
    assert best().latency_us == 120.0
    assert best().baselines == {"single": 1.0, "rowsplit": 1.0}
    run(db, (Baseline(method="tp"), single(1.0, outcome="throttled")))
    assert "tp" not in best().baselines


def test_a_faster_baseline_is_the_answer_and_says_so(db):
    chunks = [Baseline(method="microbatch", chunk=c) for c in (128, 256)]
    run(
        db,
        (CONFIG, final(120.0)),
        *((c, single(us, phase="final")) for c, us in zip(chunks, (110.0, 130.0), strict=True)),
    )
    choice = best()
    assert (choice.method, choice.config, choice.latency_us) == ("microbatch", chunks[0], 110.0)
    assert choice.baselines == {"microbatch": 110.0}
    assert "run microbatch chunk 128: our kernel is slower here" in choice.note
    alone = replace(PROBLEM, gpus=1)
    run(
        db,
        (replace(CONFIG, stage_split=(1, 0)), measured(120.0)),
        (Baseline(), single(90.0)),
        problem=alone,
    )
    assert best(gpus=1).method == "single"


def test_our_kernel_answers_where_it_is_asked_for(db):
    chunks = Baseline(method="microbatch", chunk=128)
    run(db, (CONFIG, final(120.0)), (chunks, single(110.0, phase="final")))
    assert best().config == chunks
    ours = best(ours=True)
    assert (ours.config, ours.latency_us) == (CONFIG, 120.0)
    assert ours.baselines == {"microbatch": 110.0}
    few = ctatune.best("3x512x512", gpus=2, ours=True)  # tensor parallelism is estimated faster
    assert few.method == "cta"
    assert few.latency_us > min(few.baselines.values())
    assert "one GPU alone is faster" in few.note


def test_a_tie_goes_to_our_kernel_and_says_so(db):
    ours = replace(final(101.0), samples_us=(99.0, 103.0) * 6)
    theirs = replace(single(100.0, phase="final"), samples_us=(101.0, 99.0) * 6)
    run(db, (CONFIG, ours), (Baseline(method="tp"), theirs))
    choice = best()
    assert (choice.method, choice.latency_us, choice.note) == ("cta", 101.0, "a tie with tp")
    slower = replace(final(120.0), samples_us=(119.0, 121.0) * 6)
    run(db, (CONFIG, slower), (Baseline(method="tp"), theirs))
    assert best().method == "tp"


def test_finals_go_before_screenings_and_the_newest_finals_win(db):
    run(db, (CONFIG, measured(50.0)))
    run(db, (CONFIG, measured(80.0)), (OTHER, measured(70.0)))
    assert best().latency_us == 50.0  # the best screening of all runs
    run(db, (CONFIG, measured(50.0)), (CONFIG, final(90.0)), (OTHER, final(95.0)))
    raced = single(140.0, phase="final")
    run(db, (CONFIG, measured(60.0)), (OTHER, final(100.0)), (Baseline(), raced))
    run(db, (CONFIG, measured(40.0)), (Baseline(), single(130.0)))
    assert (best().config, best().latency_us) == (OTHER, 100.0)
    assert best().baselines == {"single": 140.0}


def test_a_config_that_hung_in_the_final_does_not_serve(db):
    run(db, (CONFIG, measured(50.0)), (OTHER, measured(60.0)))
    run(db, (CONFIG, Measurement(outcome="timeout", phase="final")), (OTHER, final(60.0)))
    run(db, (CONFIG, measured(50.0)), utc="2020")  # stored later, but older
    assert best().config == OTHER
    run(db, (CONFIG, Measurement(outcome="timeout", phase="final")))  # who knows whose fault
    assert best().config == OTHER
    run(db, (CONFIG, measured(50.0)), (CONFIG, final(50.0)))
    assert best().config == CONFIG


def test_a_failure_counts_for_its_own_version_of_the_kernel(db):
    failed = Measurement(outcome="compile_error")
    run(db, (CONFIG, measured(50.0)), (OTHER, measured(60.0)))
    run(db, (CONFIG, failed), kernel="0ld")
    assert best().config == CONFIG
    run(db, (CONFIG, failed))
    assert best().config == OTHER
    run(db, (CONFIG, measured(50.0)))
    assert best().config == CONFIG
    with Store.open(db) as store:  # of who knows which version: it counts until a newer good row
        store.add_measurement(begin(store, HERE), PROBLEM, CONFIG, failed)
    assert best().config == OTHER
    run(db, (CONFIG, measured(50.0)))
    assert best().config == CONFIG


def test_a_race_without_this_kernel_is_no_answer(db):
    tp = (Baseline(method="tp"), single(90.0, phase="final"))
    run(db, (CONFIG, replace(OLD, phase="final")), tp, kernel="0ld")
    choice = best()
    assert (choice.method, choice.source) == ("cta", "predicted")
    assert f"kernel_hash differs (row 0ld, now {jit.kernel_hash()})" in choice.note
    assert "slower" not in choice.note
    found = known.stored_rows(PROBLEM, db, None)
    assert ([row.config for row in found.rows], found.outdated) == ([tp[0]], 1)
    run(db, (CONFIG, measured(100.0)), (OTHER, measured(110.0)))
    assert (best().config, best().note) == (CONFIG, "screened, not raced")
    run(db, (CONFIG, final(100.0)), tp)
    assert "run tp: our kernel is slower here" in best().note
    run(db, (CONFIG, final(80.0)), (tp[0], single(85.0, phase="final")))
    run(db, (CONFIG, replace(OLD, phase="final")), tp, kernel="0ld")
    assert (best().latency_us, best().baselines) == (80.0, {"tp": 85.0})


def test_a_baseline_answers_where_our_kernel_failed_or_cannot_run(db):
    tp = (Baseline(method="tp"), single(90.0, phase="final"))
    run(db, (CONFIG, Measurement(outcome="wrong")), tp)
    assert (best().method, best().note) == (
        "tp",
        "our kernel failed in every config that was tried",
    )
    odd = replace(PROBLEM, k=1025)
    run(db, tp, problem=odd)
    assert best(odd.shape).note == "our kernel cannot run this"


def test_latencies_that_are_not_positive_never_serve(db):
    tp = Baseline(method="tp")
    bad = replace(single(10.0, phase="final"), samples_us=(10.0, 10.0, -0.2))
    run(db, (CONFIG, final(100.0)), (tp, bad))
    assert (best().config, best().baselines) == (CONFIG, {})


def test_controls_alone_are_named(db):
    run(db, (CONFIG, measured(phase="control")))
    assert "only second runs (A/A controls) of our kernel are measured" in best().note


def test_the_newest_platform_counts_not_the_one_stored_last(db):
    run(db, (CONFIG, measured(50.0)))
    run(db, (OTHER, measured(60.0)), platform=replace(HERE, driver="550"), utc="2020")
    assert best().config == CONFIG


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"verification": None}, "not verified or not timed"),
        ({"verification": replace(PROOF, passed=False)}, "not verified or not timed"),
        ({"outcome": "throttled"}, "their outcome is throttled"),
        ({"outcome": "wrong"}, "their outcome is wrong"),
        ({"outcome": "timeout"}, "their outcome is timeout"),
        ({"latency_us": None}, "not verified or not timed"),
        ({"latency_us": -1.0}, "not verified or not timed"),
    ],
)
@pytest.mark.parametrize("phase", ["screen", "final"])
def test_what_is_not_verified_or_marked_never_serves(db, changes, why, phase):
    bad = replace(measured(1.0, phase=phase), **changes)
    run(db, (CONFIG, bad))
    choice = best()
    assert (choice.source, choice.verified) == ("predicted", False)
    assert f"measured rows exist but {why}" in choice.note
    run(db, (OTHER, measured(100.0)), (CONFIG, bad))
    assert (best().source, best().config, best().latency_us) == ("measured", OTHER, 100.0)


def test_an_older_kernel_that_counts_does_so_until_the_present_one_was_tried(db, monkeypatch):
    monkeypatch.setattr(jit, "equal_kernels", lambda: frozenset({"0ld"}))
    old = replace(OLD, phase="final", latency_us=50.0)
    run(db, (CONFIG, old), (OTHER, replace(old, latency_us=70.0)), kernel="0ld")
    choice = best()
    assert (choice.config, choice.source, choice.latency_us) == (CONFIG, "measured", 50.0)
    assert choice.note == "measured with an older version of our kernel"
    run(db, (CONFIG, Measurement(outcome="timeout", kernel=OLD.kernel)), kernel="0ld")
    assert best().config == OTHER
    run(db, (CONFIG, final(60.0)))
    assert (best().config, best().latency_us, best().note) == (CONFIG, 60.0, "")
    run(db, (CONFIG, measured(outcome="wrong")), (OTHER, final(65.0)))
    assert (best().config, best().note) == (OTHER, "")


def test_screenings_by_the_present_kernel_end_no_race_of_an_older_one(db, monkeypatch):
    monkeypatch.setattr(jit, "equal_kernels", lambda: frozenset({"0ld"}))
    old, tp = replace(OLD, phase="final"), Baseline(method="tp")
    run(
        db,
        (CONFIG, replace(old, latency_us=100.0)),
        (OTHER, replace(old, latency_us=120.0)),
        (tp, single(60.0, phase="final")),
        kernel="0ld",
    )
    before = best()
    assert (before.method, before.latency_us) == ("tp", 60.0)
    run(db, (tp, single(61.0)), (CONFIG, measured(101.0)))
    assert best() == before
    run(db, (CONFIG, final(50.0)), (tp, single(61.0, phase="final")))
    assert (best().config, best().latency_us) == (CONFIG, 50.0)


def test_a_config_that_was_ever_wrong_does_not_serve(db):
    run(db, (CONFIG, measured(10.0)), (OTHER, measured(20.0)))
    run(db, (CONFIG, Measurement(outcome="wrong", kernel=measured().kernel)))
    assert best().config == OTHER
    run(db, (OTHER, measured(outcome="wrong")))
    assert best().source == "predicted"
    assert "their config failed in another trial" in best().note


MISSES = [
    (OLD, {}, {}, f"kernel_hash differs (row 0ld, now {jit.kernel_hash()})"),
    (measured(), {}, {"name": "far"}, f"platform differs (row far, now {HERE.name})"),
    (measured(), {"output": "last"}, {}, "output differs (row last, now replicated)"),
    (measured(), {"gpus": 4}, {}, "gpus differs (row 4, now 2)"),
    (measured(regime=BURST), {}, {}, "regime differs (row burst/cold, now sustained/cold)"),
    (OLD, {"gpus": 3}, {}, "gpus differs (row 3, now 2) and kernel_hash differs (row 0ld, now "),
]


@pytest.mark.parametrize(("measurement", "problem", "platform", "note"), MISSES)
def test_a_mismatch_is_a_miss_that_names_the_column(db, measurement, problem, platform, note):
    place = {"problem": replace(PROBLEM, **problem), "platform": replace(HERE, **platform)}
    run(db, (CONFIG, measurement), **place)
    choice = best(platform=HERE.name)
    assert choice.source == "predicted"
    assert f"measured rows exist but {note}" in choice.note


@pytest.mark.parametrize(
    ("column", "value"), [("driver", "575"), ("power_limit_w", 650), ("cuda", "12.9")]
)
def test_what_else_moves_a_latency_is_part_of_the_platform(db, column, value):
    run(db, (CONFIG, final(50.0)), platform=replace(HERE, **{column: value}))
    run(db, (OTHER, measured(60.0)))  # the machine as it is now
    assert (best().config, best().latency_us) == (OTHER, 60.0)
    run(db, (OTHER, measured(70.0)), problem=replace(PROBLEM, output="last"))
    with Store.open(db) as store:
        rows = store.measurements()
    wanted = known.wanted_of(PROBLEM, known.identity(HERE))
    named = f"{column} differs (row {value}, now {getattr(HERE, column)})"
    assert known.differences(rows[0], wanted) == [named]


def test_a_row_of_another_protocol_or_shape_is_a_miss(db, monkeypatch):
    run(db, (CONFIG, measured()))
    monkeypatch.setattr(records, "SCREENING", SCREENING + 1)
    assert f"protocol differs (row {SCREENING}, now {SCREENING + 1})" in best().note
    assert best("513x1024x2048").note.startswith("this shape is not measured")


def raced(db: Path, monkeypatch: pytest.MonkeyPatch, protocol: int, *trials: Any, **rest: Any):
    """A run whose races are by a protocol."""
    with monkeypatch.context() as then:
        then.setattr(records, "RACING", protocol)
        run(db, *trials, **rest)


def test_an_older_race_stays_whole_until_ours_was_raced_anew(db, monkeypatch):
    tp = Baseline(method="tp")
    old = ((CONFIG, final(100.0)), (OTHER, final(140.0)), (tp, single(110.0, phase="final")))
    raced(db, monkeypatch, 3, *old)
    before = best()
    assert (before.config, before.baselines) == (CONFIG, {"tp": 110.0})
    slowed = Measurement(outcome="throttled", phase="final", detail="3 of 12 rounds are clean")
    run(db, (CONFIG, slowed), (tp, slowed))
    assert best() == before
    lost = Measurement(outcome="timeout", phase="final")
    run(db, (OTHER, lost), (tp, single(95.0, phase="final")))
    assert best() == before
    run(db, (OTHER, final(120.0)), (tp, single(125.0, phase="final")))
    assert (best().config, best().baselines, best().note) == (OTHER, {"tp": 125.0}, "")


def test_what_was_wrong_in_an_older_race_stays_wrong(db, monkeypatch):
    bad = final(90.0, outcome="wrong", verification=None)
    raced(db, monkeypatch, 3, (CONFIG, bad), (OTHER, final(120.0)))
    run(db, (CONFIG, final(100.0)), (OTHER, final(120.0)))
    assert best().config == OTHER


def test_what_was_slowed_down_or_badly_timed_bans_nothing(db, monkeypatch):
    monkeypatch.setattr(jit, "equal_kernels", lambda: frozenset({"0ld"}))
    run(db, (CONFIG, replace(OLD, latency_us=50.0)), kernel="0ld")
    run(db, (CONFIG, Measurement(outcome="throttled", kernel=measured().kernel)))
    assert (best().source, best().latency_us) == ("measured", 50.0)
    fault = final(1.0, outcome="wrong", detail="timing fault")  # its verification passed
    raced(db, monkeypatch, 3, (CONFIG, fault), (OTHER, final(90.0)))
    run(db, (CONFIG, final(80.0)), (OTHER, final(90.0)))
    assert (best().config, best().latency_us) == (CONFIG, 80.0)


def test_evidence_names_a_kernel_only_where_it_is_ours(db):
    run(db, (CONFIG, final(100.0)), (Baseline(method="tp"), single(60.0, phase="final")))
    assert (best().method, best().evidence["kernel"]) == ("tp", None)
    assert best().evidence["phase"] == "final"


def test_rows_from_when_matrices_were_dense_count_where_they_lie_the_same(db, monkeypatch):
    """Rows of 1000 columns are padded to whole cache lines, 1024 fill them."""
    ragged = replace(PROBLEM, h=1000)
    with monkeypatch.context() as then:
        then.setattr(records, "SCREENING", 3)
        for problem in (PROBLEM, ragged):
            run(db, (CONFIG, measured(50.0)), problem=problem)
    raced(db, monkeypatch, 3, (CONFIG, final(51.0)), problem=ragged)
    assert (best().source, best().latency_us) == ("measured", 50.0)
    assert "protocol differs (row 3, now" in best(ragged.shape).note
    raced(db, monkeypatch, 4, (CONFIG, final(52.0)), problem=ragged)
    assert (best(ragged.shape).latency_us, best(ragged.shape).source) == (52.0, "measured")
    wide = replace(PROBLEM, k=1000)  # X is dense, the rows of W_up are not
    with monkeypatch.context() as then:
        then.setattr(records, "SCREENING", 3)
        run(db, (CONFIG, measured(50.0)), problem=wide)
    assert best(wide.shape).source != "measured"


def test_races_of_the_protocol_before_count_until_there_is_one_of_this(db, monkeypatch):
    tp = Baseline(method="tp")
    with monkeypatch.context() as before:
        before.setattr(records, "RACING", RACING - 1)
        run(db, (CONFIG, final(50.0)), (OTHER, final(55.0)), (tp, single(70.0, phase="final")))
    assert (best().config, best().note) == (CONFIG, f"measured with protocol {RACING - 1}")
    run(db, (CONFIG, measured(53.0)), (OTHER, measured(52.0)))
    assert (best().config, best().latency_us) == (CONFIG, 50.0)
    run(db, (OTHER, final(56.0)), (tp, single(75.0, phase="final")))
    assert (best().config, best().baselines, best().note) == (OTHER, {"tp": 75.0}, "")
    with monkeypatch.context() as before:
        before.setattr(records, "RACING", 2)  # does not count
        run(db, (CONFIG, final(1.0)))
    assert best().latency_us == 56.0


def test_what_no_longer_counts_is_counted_apart_from_what_still_does(db, monkeypatch):
    for protocol in (2, 3, 4):
        with monkeypatch.context() as before:
            before.setattr(records, "RACING", protocol)
            run(db, (CONFIG, final(50.0)))
    found = known.stored_rows(PROBLEM, db, None)
    assert ([row.protocol for row in found.rows], found.outdated) == ([3, 4], 1)


def test_the_users_rows_win_over_the_shipped_ones(db, monkeypatch):
    with Store.memory() as store:
        store.add_measurement(begin(store, HERE), PROBLEM, CONFIG, final(50.0))
        rows = store.measurements()
    monkeypatch.setattr(ctatune.choice, "shipped", lambda _: tuple(rows))
    assert (best().latency_us, best().note) == (50.0, "from the shipped measurements")
    run(db, (CONFIG, measured(80.0)))
    assert best().latency_us == 50.0  # finals go before a bare screening


def test_shipped_rows_are_read_from_the_seed(tmp_path, monkeypatch):
    monkeypatch.undo()
    with Store.memory() as store:
        store.add_measurement(begin(store, HERE), PROBLEM, CONFIG, final(50.0))
        lines = list(export_lines(store))
    (tmp_path / "measurements").mkdir()
    (tmp_path / "measurements" / "a.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(ctatune.seed, "room", lambda _: tmp_path)
    forget_shipped()
    assert best(db=tmp_path / "none.db").latency_us == 50.0
    forget_shipped()


def test_the_platform_that_was_used_last_is_meant(db):
    mine = replace(HERE, name="mine")
    run(db, (CONFIG, measured(70.0)), platform=mine)
    assert (best().platform, best().latency_us) == ("mine", 70.0)
    run(db, (CONFIG, measured(60.0)), platform=replace(HERE, name="other"))
    assert (best().platform, best().latency_us) == ("other", 60.0)
    small = replace(HERE, name="small", gpus=1)
    run(db, (CONFIG, measured(90.0)), platform=small, problem=replace(PROBLEM, gpus=1))
    assert best().platform == "other"  # of those with two GPUs
    assert best(gpus=1).platform == "small"
    assert best(platform="mine").latency_us == 70.0


def test_a_platform_without_a_model_has_the_rates_of_the_same_gpu(db):
    run(db, (CONFIG, measured(70.0)), platform=replace(HERE, name="mine"))
    few = best("3x512x512")
    assert (few.platform, few.source) == ("mine", "predicted")
    assert f"with the rates of {HERE.name}" in few.note
    run(db, (CONFIG, measured(70.0)), platform=replace(HERE, name="mine", gpu="Other"))
    with pytest.raises(NoAnswer, match="there is no model of platform 'mine'"):
        best("3x512x512")


def test_a_new_driver_does_not_hide_what_was_measured_with_another(db):
    run(db, (CONFIG, measured(70.0)))
    newer = replace(HERE, driver="999")
    run(db, (CONFIG, measured(60.0)), platform=newer, problem=replace(PROBLEM, m=2 * PROBLEM.m))
    assert (best().source, best().latency_us) == ("measured", 70.0)


def test_a_platform_that_nobody_knows_has_no_answer(db):
    run(db, (CONFIG, measured(70.0)))
    with pytest.raises(
        NoAnswer, match=r"platform differs .*now nowhere.*there is no model of platform"
    ):
        best(platform="nowhere")


def test_without_measurements_the_estimate_answers(db):
    choice = best()
    configs = list(space.candidates(PROBLEM, sm_count=HERE.sm_count))
    predicted = [latency.estimate(PROBLEM, config, MACHINE) for config in configs]
    lowest = min(predicted, key=lambda prediction: prediction.latency_us)
    assert choice.config == configs[predicted.index(lowest)]
    assert (choice.latency_us, choice.interval_us) == (lowest.latency_us, lowest.interval_us)
    assert (choice.source, choice.verified) == ("predicted", False)
    rivals = {b.method: latency.estimate(PROBLEM, b, MACHINE) for b in modelled(PROBLEM)}
    assert choice.baselines == {method: rival.latency_us for method, rival in rivals.items()}
    assert set(rivals) == {"single", "tp", "tp_twoshot"}
    assert not db.exists()
    assert best(gpus=4).platform == HERE.name


def test_a_simulation_goes_before_the_estimate_and_is_never_measured(db):
    simulate(db, 1.0, model="estimate-1")
    assert best().source == "predicted"
    assert best().latency_us != 1.0
    simulate(db, 0.5, Baseline())
    simulate(db, 0.5, replace(OTHER, stages=99))  # cannot run
    simulate(db, 3.0)
    simulate(db, 2.0, CONFIG)
    choice = best()
    assert (choice.source, choice.verified) == ("simulated", False)
    assert (choice.config, choice.latency_us, choice.interval_us) == (CONFIG, 2.0, (1.0, 4.0))
    assert f"computed by {SIMULATOR}" in choice.note
    simulate(db, 1.0, model="simulator-1")  # of an older version
    assert best().latency_us == 2.0
    simulate(db, -1.0, replace(CONFIG, pace_us=4.0))  # damaged
    assert best().latency_us == 2.0
    run(db, (OTHER, measured(1e6)))
    assert (best().source, best().latency_us) == ("measured", 1e6)


def test_a_few_simulations_do_not_hide_what_the_estimate_finds(db):
    estimated = best()
    simulate(db, 2.0 * estimated.latency_us)
    assert (best().config, best().source) == (estimated.config, "predicted")
    simulate(db, 0.5 * estimated.latency_us)
    assert (best().config, best().source) == (OTHER, "simulated")


def test_a_config_that_failed_here_is_not_predicted(db):
    first = best().config
    run(db, (first, measured(outcome="launch_error")), (OTHER, measured(outcome="timeout")))
    simulate(db, 1.0, OTHER)
    assert best().source == "predicted"
    assert best().config not in (first, OTHER)


def test_a_baseline_is_predicted_where_it_is_faster_and_did_not_fail(db):
    problem = Problem(m=400, k=8192, h=28672, n=8192, gpus=2)
    found = ctatune.best(problem.shape, gpus=2, platform=HERE.name)
    assert (found.source, found.config) == ("predicted", Baseline(method="tp_twoshot"))
    failed = [Baseline(method="tp", nccl="ring/ll"), Baseline(method="tp_twoshot", graph=True)]
    wrong = measured(outcome="wrong", phase="screen")
    run(db, *((config, wrong) for config in failed), problem=problem)
    ctatune.refresh()
    assert ctatune.best(problem.shape, gpus=2, platform=HERE.name).method == "cta"


def test_what_cannot_run_has_no_answer():
    problem = replace(PROBLEM, k=1025)
    reason = limits.why_invalid(space.default_config(problem), problem)
    assert reason
    with pytest.raises(NoAnswer, match=re.escape(reason)):
        best(problem.shape)


def test_wrong_usage_and_damaged_databases_are_told(db):
    with pytest.raises(UsageError):
        best(output="everywhere")
    db.write_text("not a database" * 100)
    with pytest.raises(StoreError, match="not a database"):
        best()


def test_threads_get_the_same_answer(db):
    run(db, (CONFIG, measured(120.0)), (OTHER, measured(110.0)))
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: best().latency_us, range(32))) == {110.0}


def test_importing_and_asking_needs_neither_cuda_nor_optuna(tmp_path):
    (tmp_path / "pandas.py").write_text("Timestamp = None")  # as if it were installed
    code = """if True:
        import sys
        import ctatune.choice
        heavy = {"cuda", "optuna", "scipy", "pandas"}
        assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
        ctatune.best("512x1024x2048x1024", gpus=2)
        assert not (heavy - {"pandas"}) & sys.modules.keys()
    """
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parent.parent}"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_control_is_no_contestant(db):
    run(db, (CONFIG, final(100.0)), (CONFIG, measured(50.0, phase="control")))
    assert best().latency_us == 100.0
