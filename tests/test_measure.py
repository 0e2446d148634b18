"""What the bench does around the GPUs, on fakes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ctatune import measure, telemetry
from ctatune.measure import Bench
from ctatune.problem import Problem

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


def test_energy_is_of_each_gpu_and_absent_where_nvml_does_not_count(monkeypatch):
    def count_mj(handle: int) -> int:
        if handle == 7:
            raise telemetry.pynvml.NVMLError(3)  # not supported
        return 1000 * handle

    monkeypatch.setattr(telemetry.pynvml, "nvmlDeviceGetTotalEnergyConsumption", count_mj)
    held: Any = object.__new__(telemetry.Telemetry)
    held._handles = [2, 3]
    assert held.energies_j() == [2.0, 3.0]
    held._handles = [2, 7]
    assert held.energies_j() == []
