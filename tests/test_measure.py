"""What the bench does around the GPUs, on fakes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ctatune import measure, telemetry
from ctatune.errors import PipelineTimeoutError
from ctatune.measure import Bench
from ctatune.problem import Problem
from ctatune.timing import Chain, Loaded

PROBLEM = Problem(m=1024, k=8192, h=8192, n=8192, gpus=2)


def test_one_reference_serves_until_problem_or_seed_changes(monkeypatch):
    closed: list[int] = []
    bench: Any = object.__new__(Bench)
    bench.gpus, bench._reference = None, None
    bench._reference_arena = SimpleNamespace(close=lambda: closed.append(1))
    monkeypatch.setattr(
        measure,
        "Reference",
        lambda _gpus, _arena, problem, seed: SimpleNamespace(problem=problem, seed=seed),
    )
    first = bench._reference_of(PROBLEM, 1)
    assert bench._reference_of(PROBLEM, 1) is first
    assert bench._reference_of(PROBLEM, 2) is not first
    assert bench._reference_of(replace(PROBLEM, m=64), 2).problem.m == 64
    assert len(closed) == 3  # before each new one, the memory of the old one was given back


class Timed:
    def calls_for(self, *_: object) -> int:
        return 10

    def load(self, _: object, calls: int, seconds: float, *, duty: float) -> Loaded:
        return Loaded(calls * round(10 * seconds), duty / 2)


@pytest.mark.parametrize(
    ("counter", "state"),
    [
        ([100.0, 350.0, 350.0, 400.0], {"duty": 0.25, "energy_j": 3.0}),
        ([None, None, 1.0, 2.0], {"duty": 0.25}),
    ],
)
def test_energy_is_a_call_of_all_load_segments(counter, state):
    readings = iter(counter)
    telemetry: Any = SimpleNamespace(energy_j=lambda: next(readings))
    timer: Any = Timed()
    load = measure._Load(timer, telemetry, SimpleNamespace(call=None, launches=10))  # type: ignore[arg-type]
    assert load.run(0.8) == 0.5
    assert load.run(0.2, 0.5) == 0.25
    assert load.state() == state


def test_energy_is_of_all_gpus_and_absent_where_nvml_does_not_count(monkeypatch):
    def count_mj(handle: int) -> int:
        if handle == 7:
            raise telemetry.pynvml.NVMLError(3)  # not supported
        return 1000 * handle

    monkeypatch.setattr(telemetry.pynvml, "nvmlDeviceGetTotalEnergyConsumption", count_mj)
    held: Any = object.__new__(telemetry.Telemetry)
    held._handles = [2, 3]
    assert held.energy_j() == 5.0
    held._handles = [2, 7]
    assert held.energy_j() is None


class Lost:
    """A timer on which the first contestant times out, and that notes the duty of later loads."""

    def __init__(self) -> None:
        self.duties: list[float] = []

    def calls_for(self, *_: object) -> int:
        return 8

    def load(self, call: object, calls: int, _: float, *, duty: float) -> Loaded:
        if call == "dead":
            raise PipelineTimeoutError("waited in vain")
        self.duties.append(duty)
        return Loaded(calls, 0.9)

    def chain(self, call: object, _: int) -> Chain:
        return Chain(latency_us={"fast": 50.0, "slow": 60.0}[str(call)], floor_us=5.0)


def test_who_times_out_leaves_the_race_and_its_load_counts_for_nobody():
    bench = measure.Bench.__new__(measure.Bench)
    telemetry: Any = SimpleNamespace(energy_j=lambda: None, read=lambda: None, marks=lambda _: [])
    bench._telemetry = telemetry
    timer: Any = Lost()
    names = ("dead", "fast", "slow")
    field: Any = {
        i: measure._Load(timer, telemetry, SimpleNamespace(call=name, launches=10))  # type: ignore[arg-type]
        for i, name in enumerate(names)
    }
    rounds, lost = bench._race(timer, field, 1)
    assert lost == {0: "waited in vain"}
    assert [len(rounds[i]) for i in range(3)] == [0, measure.MIN_ROUNDS, measure.MIN_ROUNDS]
    assert set(timer.duties) == {1.0, 0.9}
