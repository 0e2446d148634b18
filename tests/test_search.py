"""The search on a fake bench and on the simulator: order, resumption, what it never believes."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from fakes import FakeBench

from ctatune import space
from ctatune.baseline_latency import modelled
from ctatune.choice import choose
from ctatune.config import Baseline
from ctatune.jit import kernel_hash
from ctatune.machine_model import load
from ctatune.problem import Problem
from ctatune.proposals import Proposals, axes
from ctatune.search import TRIES, Hardware, Simulated, rank, search
from ctatune.store import Store
from ctatune.worker import Worker

PROBLEM = Problem(m=1280, k=8192, h=8192, n=8192, gpus=2)  # not a shipped shape
MACHINE = load()


def run_of(store: Store) -> int:
    return store.begin_run(
        MACHINE.platform, command="test", compiler="none", versions={"kernel": kernel_hash()}
    )


def hardware(path, bad: str = "", *, trials: int, report=lambda _: None) -> int:
    with Store.open(path) as store, Worker(2, partial(FakeBench, bad)) as child:
        judge = Hardware(PROBLEM, store, run_of(store), child, MACHINE)
        return search(PROBLEM, judge, MACHINE, report, trials=trials)


def test_a_search_measures_races_and_is_looked_up_again(tmp_path):
    path = tmp_path / "x.db"
    assert hardware(path, trials=24) == 24
    with Store.open(path) as store:
        rows = store.measurements(PROBLEM)
    screened = [row for row in rows if row.measurement.phase == "screen"]
    finals = [row for row in rows if row.measurement.phase == "final"]
    assert (
        len({row.config for row in screened}) == len(screened) == 24 + len(space.baselines(PROBLEM))
    )
    methods = {"single", "tp", "tp_twoshot", "rowsplit", "microbatch", "microbatch_cta"}
    assert {row.config.method for row in finals} == {"cta"} | methods
    assert [row.config.method for row in finals].count("microbatch") == 1  # its best chunk
    assert space.default_config(PROBLEM) in {row.config for row in finals}
    controls = [row.config for row in rows if row.measurement.phase == "control"]
    best_ours = min(
        screened, key=lambda row: (row.config.method != "cta", row.measurement.latency_us)
    )
    assert [config.method for config in controls] == ["cta", "tp"]
    assert controls[0] == best_ours.config
    proofs = [row.measurement.verification for row in rows]
    assert len({proof.seed for proof in proofs if proof}) == 1  # one reference serves all
    choice = choose(PROBLEM, path, None)
    fastest = min(
        (row for row in finals if row.config.method == "cta"),
        key=lambda row: row.measurement.latency_us or 0,
    )
    assert (choice.source, choice.config) == ("measured", fastest.config)
    assert choice.baselines.keys() == methods


def test_the_same_command_goes_on_and_does_nothing_twice(tmp_path):
    path = tmp_path / "x.db"
    assert hardware(path, trials=6) == 6
    assert hardware(path, trials=10) == 4
    assert hardware(path, trials=10) == 0


def test_an_interrupted_search_keeps_what_it_reported(tmp_path):
    path, seen = tmp_path / "x.db", []

    def stop_after_three(step) -> None:
        seen.append(step.config)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hardware(path, trials=10, report=stop_after_three)
    assert hardware(path, trials=10) == 7


def test_finals_that_were_missed_are_made_up_for(tmp_path, monkeypatch):
    path = tmp_path / "x.db"

    def stop(*_) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Hardware, "finals", stop)
        with pytest.raises(KeyboardInterrupt):
            hardware(path, trials=4)
    assert hardware(path, trials=4) == 0
    with Store.open(path) as store:
        assert store.measurements(PROBLEM, phase="final")


def test_a_final_that_was_lost_is_repeated_and_blames_nobody(tmp_path):
    path = tmp_path / "x.db"
    hardware(path, "lost final", trials=6)
    with Store.open(path) as store:
        finals = store.measurements(PROBLEM, phase="final")
        screened = store.measurements(PROBLEM, phase="screen")
    assert {row.measurement.outcome for row in finals} == {"launch_error"}
    fastest = min(screened, key=lambda row: row.measurement.latency_us or 0)
    assert choose(PROBLEM, path, None).config == fastest.config
    for _ in range(2):  # the second one does nothing
        assert hardware(path, trials=6) == 0
        with Store.open(path) as store:
            assert len(store.measurements(PROBLEM, phase="final")) == 2 * len(finals)


def test_a_final_is_stored_whole_or_not_at_all(tmp_path, monkeypatch):
    path, keep = tmp_path / "x.db", Hardware._keep

    def stop_at_a_control(self, config, measured):
        if measured.phase == "control":
            raise KeyboardInterrupt
        return keep(self, config, measured)

    with monkeypatch.context() as patched:
        patched.setattr(Hardware, "_keep", stop_at_a_control)
        with pytest.raises(KeyboardInterrupt):
            hardware(path, trials=4)
    with Store.open(path) as store:
        assert store.measurements(PROBLEM, phase="final") == []


def test_baselines_that_lacked_a_library_or_are_new_are_raced_later(tmp_path, monkeypatch, caplog):
    def raced(path) -> list[set[str]]:
        with Store.open(path) as store:
            rows = store.measurements(PROBLEM, phase="final")
        by_run = {run: [r for r in rows if r.run_id == run] for run in {r.run_id for r in rows}}
        return [{row.config.method for row in by_run[run]} for run in sorted(by_run)]

    path = tmp_path / "missing.db"
    hardware(path, "no wheel", trials=4)
    hardware(path, "no wheel", trials=4)  # nothing is new
    assert raced(path) == [{"cta"}]
    assert [message.count("not installed") for message in caplog.messages] == [1, 1]
    assert hardware(path, trials=4) == 0
    assert len(raced(path)) == 2
    assert {"cta", "single", "tp"} < raced(path)[1]

    path = tmp_path / "new.db"
    with monkeypatch.context() as patched:
        patched.setattr(space, "baselines", lambda _: [Baseline(method="single")])
        hardware(path, trials=4)
    assert hardware(path, trials=4) == hardware(path, trials=4) == 0
    assert raced(path)[0] == {"cta", "single"}
    assert len(raced(path)) == 2
    assert "tp" in raced(path)[1]


def test_what_another_kernel_failed_at_is_tried_again(tmp_path, monkeypatch):
    path = tmp_path / "x.db"
    with monkeypatch.context() as patched:
        patched.setattr("test_search.kernel_hash", lambda: "0ld")
        patched.setattr("ctatune.jit.kernel_hash", lambda: "0ld")
        for _ in range(TRIES):
            hardware(path, "break", trials=8)
    with Store.open(path) as store:
        broken = {r.config for r in store.measurements() if r.measurement.outcome != "ok"}
        judge = Hardware(PROBLEM, store, run_of(store), Worker.__new__(Worker), MACHINE)
        judge._worker.platform = MACHINE.platform
        assert broken
        assert not broken & judge.known().keys()


def test_what_may_be_the_machines_fault_is_tried_again_once(tmp_path):
    path = tmp_path / "x.db"
    hardware(path, "break", trials=8)
    with Store.open(path) as store:
        broken = {r.config for r in store.measurements() if r.measurement.outcome != "ok"}
    assert broken
    assert hardware(path, trials=8) == len(broken)


@pytest.mark.parametrize("bad", ["wrong", "too fast", "break"])
def test_what_failed_is_stored_and_never_served(tmp_path, bad):
    path = tmp_path / "x.db"
    hardware(path, bad, trials=12)
    with Store.open(path) as store:
        outcomes = {row.measurement.outcome for row in store.measurements(PROBLEM)}
    assert outcomes == {"ok", "launch_error" if bad == "break" else "wrong"}
    choice = choose(PROBLEM, path, None)
    assert choice.config.up.n != 128  # type: ignore[union-attr]


def test_the_simulator_stores_predictions_only(tmp_path, caplog):
    path = tmp_path / "x.db"
    with Store.open(path) as store:
        judge = Simulated(PROBLEM, store, run_of(store), MACHINE)
        assert search(PROBLEM, judge, MACHINE, lambda _: None, trials=8) == 8
        assert store.measurements() == []
        assert len(store.predictions(PROBLEM)) == 8 + len(modelled(PROBLEM))
        assert [m.count("no model of it") for m in caplog.messages] == [1]
        assert search(PROBLEM, judge, MACHINE, lambda _: None, trials=8) == 0


def test_first_the_default_then_the_estimate_with_one_of_each_family(tmp_path):
    steps = []
    hardware(tmp_path / "x.db", trials=15, report=lambda step: steps.append(step.config))
    ranked = rank(PROBLEM, MACHINE)
    assert steps[0] == space.default_config(PROBLEM)
    assert steps[1] == space.default_pipeline(PROBLEM)
    positions = [ranked.index(config) for config in steps[2:]]
    assert positions == sorted(positions)
    assert positions[0] == 0 or ranked[0] in steps[:2]
    families = Counter(
        (
            c.up.m,
            c.up.n,
            c.up.split_k,
            c.down.n,
            c.stages,
            c.d_slabs,
            c.multicast,
            c.direct,
            c.down_axis,
        )
        for c in steps[2:]
    )
    assert max(families.values()) == 1


def test_optuna_proposes_each_valid_config_at_most_once():
    ranked = rank(PROBLEM, MACHINE)
    proposals = Proposals(ranked, {})
    seen = set()
    for config in proposals:
        assert config not in seen
        seen.add(config)
        proposals.tell(config, 100.0 + config.down.group_m)
        if len(seen) == 20:
            break
    assert len(seen) == 20
    assert seen <= set(ranked)


def test_axes_tell_all_candidates_apart():
    ranked = rank(PROBLEM, MACHINE)
    assert len({axes(config) for config in ranked}) == len(ranked)
