"""A row as a line of JSON: what is exported comes back, bytes and all; damage is a miss.

Also what the tests of store and `best` share: a problem, a platform, rows, and how to make any.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ctatune.seed
from ctatune.config import AnyConfig, Baseline, Config, Tile
from ctatune.problem import OUTPUTS, Problem
from ctatune.records import (
    SCREENING,
    KernelBuild,
    Measurement,
    Outcome,
    Phase,
    Platform,
    Prediction,
    Regime,
    Verification,
    protocol_of,
)
from ctatune.rows import canonical_json, warn_once
from ctatune.seed import (
    export_lines,
    forget_shipped,
    import_lines,
    parse_line,
    shipped_rows,
    shipped_shapes,
)
from ctatune.store import Store

PROBLEM = Problem(m=512, k=1024, h=2048, n=1024, gpus=2)
CONFIG = Config(up=Tile(m=128, n=128), down=Tile(m=128, n=128), stages=6, d_slabs=2)
PLATFORM = Platform(
    name="box",
    gpu="NVIDIA H200",
    gpus=2,
    link="NV18",
    sm_count=132,
    l2_bytes=62_914_560,
    power_limit_w=700,
    driver="580.1",
    cuda="13.0",
)
PROOF = Verification(
    passed=True, seed=7, relative_error=1e-3, worst_error=0.02, nans=0, bitwise_equal=True
)
BUILD = KernelBuild(hash="abc", compiler="nvrtc 13.0", registers=168, local_bytes=0, smem_bytes=99)
GOOD = Measurement(
    outcome="ok",
    latency_us=100.5,
    interval_us=(99.0, 101.0),
    samples_us=(99.0, 100.5, 101.0),
    verification=PROOF,
    kernel=BUILD,
)

counts = st.integers(0, 2**63 - 1)
times = st.floats(0, 1e9)
errors = st.floats().map(lambda error: error + 0.0)  # also nan and inf; SQLite has no -0.0
json_maps = st.dictionaries(st.text(), st.none() | st.booleans() | counts | times | st.text())
sizes = st.integers(1, 1 << 20)
problems = st.builds(
    Problem,
    m=sizes,
    k=sizes,
    h=sizes,
    n=sizes,
    gpus=st.integers(1, 8),
    output=st.sampled_from(OUTPUTS),
)
tiles = st.builds(Tile, m=st.integers(1), n=st.integers(1), group_m=st.integers(1))
configs = st.builds(Baseline) | st.builds(
    Config, up=tiles, down=tiles, stages=st.integers(), d_slabs=st.integers(), mix=st.floats(0, 1)
)
platforms = st.builds(
    Platform,
    gpus=counts,
    sm_count=counts,
    l2_bytes=counts,
    power_limit_w=counts,
)
proofs = st.builds(
    Verification, seed=counts, nans=counts, relative_error=errors, worst_error=errors
)
builds = st.builds(KernelBuild, registers=counts, local_bytes=counts, smem_bytes=counts)
measurements = st.builds(
    Measurement,
    outcome=st.sampled_from(get_args(Outcome)),
    phase=st.sampled_from(get_args(Phase)),
    detail=st.text(),
    latency_us=st.none() | times,
    interval_us=st.none() | st.tuples(times, times),
    samples_us=st.lists(times).map(tuple),
    floor_us=st.none() | times,
    single_shot_us=st.none() | times,
    regime=st.builds(
        Regime,
        load=st.sampled_from(["sustained", "burst"]),
        cache=st.sampled_from(["cold", "warm"]),
    ),
    verification=st.none() | proofs,
    kernel=st.none() | builds,
    gpu_state=json_maps,
)


def begin(store: Store, platform: Platform = PLATFORM) -> int:
    return store.begin_run(platform, command="search", compiler="nvrtc", versions={"ctatune": "1"})


@pytest.fixture(scope="module")
def shared():
    with Store.memory() as store:
        yield store


@settings(deadline=None)
@given(problem=problems, config=configs, measured=measurements, platform=platforms)
def test_a_measurement_comes_back_as_it_was(
    shared: Store, problem: Problem, config: AnyConfig, measured: Measurement, platform: Platform
):
    run = begin(shared, platform)
    row_id = shared.add_measurement(run, problem, config, measured)
    (row,) = shared.measurements(problem, platform.name, id=row_id)
    assert canonical_json(asdict(row.measurement)) == canonical_json(asdict(measured))
    assert (row.problem, row.config, row.platform) == (problem, config, platform)
    assert (row.id, row.run_id, row.trial, row.protocol) == (
        row_id,
        run,
        1,
        protocol_of(measured.phase),
    )
    assert row.kernel_hash == (measured.kernel.hash if measured.kernel else None)
    assert row.run.versions == {"ctatune": "1"}


@settings(deadline=None)
@given(problem=problems, config=configs, low=times, value=times, model=st.text())
def test_a_prediction_comes_back(shared, problem, config, low, value, model):
    predicted = Prediction(latency_us=value, interval_us=(low, value), model=model)
    row_id = shared.add_prediction(begin(shared), problem, config, predicted)
    (row,) = shared.predictions(problem, "box", id=row_id)
    assert (row.problem, row.config, row.prediction) == (problem, config, predicted)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(problems, configs, measurements, platforms), max_size=4))
def test_exported_lines_come_back_byte_for_byte(trials):
    with Store.memory() as one, Store.memory() as other:
        for problem, config, measured, platform in trials:
            one.add_measurement(begin(one, platform), problem, config, measured)
        lines = list(export_lines(one))
        assert import_lines(other, reversed(lines), origin="a test") == (len(lines), 0, 0)
        assert list(export_lines(other)) == lines == list(export_lines(one))
        assert import_lines(other, lines, origin="a test") == (0, len(lines), 0)
        assert list(export_lines(other)) == lines


def exported(trials: int = 2) -> list[str]:
    with Store.memory() as store:
        run = begin(store)
        for _ in range(trials):
            store.add_measurement(run, PROBLEM, CONFIG, GOOD)
        predicted = Prediction(latency_us=1.0, interval_us=(1.0, 1.0), model="simulator-1")
        store.add_prediction(run, PROBLEM, CONFIG, predicted)
        return list(export_lines(store))


def test_a_line_holds_the_whole_identity_and_no_prediction():
    first, second = exported()
    line = json.loads(first)
    assert line["trial"] == 1
    assert json.loads(second)["trial"] == 2
    assert line["run"].keys() == {"utc", "command", "compiler", "versions", "platform"}
    assert line["run"]["platform"] == asdict(PLATFORM)
    assert line["measurement"]["kernel"] == asdict(BUILD)
    assert line["measurement"]["verification"] == asdict(PROOF)
    assert line["measurement"]["samples_us"] == list(GOOD.samples_us)
    assert (line["problem"], line["protocol"]) == (asdict(PROBLEM), SCREENING)
    assert "simulator" not in first + second


def test_what_is_not_finite_stays_so():
    assert canonical_json({"b": [math.nan, -math.inf], "a": 1.5}) == '{"a":1.5,"b":[null,"-inf"]}'
    proof = replace(PROOF, passed=False, relative_error=math.nan, worst_error=math.inf)
    with Store.memory() as store, Store.memory() as other:
        bad = replace(GOOD, outcome="wrong", verification=proof)
        store.add_measurement(begin(store), PROBLEM, CONFIG, bad)
        import_lines(other, export_lines(store), origin="a test")
        for row in store.measurements() + other.measurements():
            assert row.measurement.verification
            assert math.isnan(row.measurement.verification.relative_error)
            assert row.measurement.verification.worst_error == math.inf


def test_export_is_sorted_by_platform_and_time_and_can_be_narrowed():
    with Store.memory() as store:
        for name in ("b", "a", "b"):
            run = begin(store, replace(PLATFORM, name=name))
            store.add_measurement(run, PROBLEM, CONFIG, GOOD)
        runs = [json.loads(line)["run"] for line in export_lines(store)]
        keys = [(run["platform"]["name"], run["utc"]) for run in runs]
        assert keys == sorted(keys)
        assert [name for name, _ in keys] == ["a", "b", "b"]
        assert len(list(export_lines(store, platform="b"))) == 2


def without(line: str, *path: str) -> str:
    document = json.loads(line)
    inside = document
    for name in path[:-1]:
        inside = inside[name]
    del inside[path[-1]]
    return json.dumps(document)


DAMAGED = {
    "cut off": lambda line: line[: len(line) // 2],
    "no JSON": lambda _: "<<<<<<< HEAD",
    "no object": lambda _: "[1, 2]",
    "nested too deep": lambda _: "[" * 100_000,
    "no run": lambda line: without(line, "run"),
    "no platform name": lambda line: without(line, "run", "platform", "name"),
    "no outcome": lambda line: without(line, "measurement", "outcome"),
    "unknown outcome": lambda line: line.replace('"ok"', '"splendid"'),
    "unknown field": lambda line: line.replace('"trial":1', '"trial":1,"colour":2'),
    "wrong type": lambda line: line.replace('"sm_count":132', '"sm_count":"132"'),
    "not possible": lambda line: line.replace('"m":512', '"m":0'),
    "too large": lambda line: line.replace('"trial":1', f'"trial":{10**30}'),
    "no config": lambda line: without(line, "config", "up", "m"),
    "no number": lambda line: line.replace("100.5", '"fast"'),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_line_is_reported_once_and_skipped(how, caplog):
    warn_once.cache_clear()
    first, second = exported()
    damaged = DAMAGED[how](first)
    assert damaged != first
    for _ in range(2):
        with Store.memory() as store:
            assert import_lines(store, [damaged, "", second], origin="x.jsonl") == (1, 0, 1)
            assert [row.trial for row in store.measurements()] == [2]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("x.jsonl line 1 is damaged")


def test_the_shipped_lines_are_loaded_from_all_files(tmp_path, monkeypatch, caplog):
    first, second = exported()
    folder = tmp_path / "measurements"
    folder.mkdir()
    monkeypatch.setattr(ctatune.seed, "room", lambda _: tmp_path)
    forget_shipped()
    assert shipped_shapes() == ()
    (folder / "a.jsonl").write_text(first + "\n")
    lacking = second.replace('"trial"', '"trail"')
    (folder / "b.jsonl").write_text("\ufffd\n" + second + "\n" + lacking + "\n")
    forget_shipped()
    rows = shipped_rows()
    assert rows == [parse_line(first), parse_line(second)]
    assert [message.count("is damaged") for message in caplog.messages] == [1, 1]
    forget_shipped()


def test_what_is_shipped_is_whole_and_in_canonical_order(caplog):
    folder = ctatune.seed.room("db") / "measurements"
    for path in folder.glob("*.jsonl"):
        lines = path.read_text().splitlines()
        with Store.memory() as store:
            assert import_lines(store, lines, origin=str(path)).added == len(lines)
            assert list(export_lines(store)) == lines
    assert shipped_shapes()
    assert caplog.messages == []
