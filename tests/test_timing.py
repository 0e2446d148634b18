"""When the calls of a steady chain are enqueued, and which are timed, on streams that are fakes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ctatune import timing
from ctatune.errors import PipelineTimeoutError
from ctatune.timing import Timer


@pytest.fixture
def steady(monkeypatch) -> Any:
    """A chain of batches of ten calls that take a second each; batch `late` ends before the host
    has enqueued the next one. Gives what was found and what was done."""
    log: list[str] = []
    timer: Any = object.__new__(Timer)
    timer._start, timer._end = "start", "end"
    timer._record = log.append
    timer.enqueue = lambda _call, _calls: log.append("batch")
    timer._timed_us = lambda: 600.0
    monkeypatch.setattr(timing.time, "monotonic", lambda: log.count("batch"))

    def run(
        seconds: float, late: int | None = None, done: Any = None
    ) -> tuple[float | None, list[str]]:
        def marks() -> list[Any]:
            i = log.count("batch") - 1
            return [SimpleNamespace(is_done=i == late, sync=lambda: log.append(f"wait for {i}"))]

        timer._marks = marks
        return timer.steady(None, 10, seconds, done), log

    return run


def test_the_second_half_is_timed_and_each_batch_is_enqueued_while_the_one_before_runs(steady):
    found, log = steady(4.0)
    assert log == [
        *("start", "batch"),
        *("start", "batch", "wait for 0"),
        *("batch", "wait for 1"),
        *("batch", "wait for 2"),
        "end",
    ]
    assert found == 600.0 / 30


@pytest.mark.parametrize(("late", "behind"), [(0, False), (1, True), (4, True), (5, False)])
def test_a_host_that_falls_behind_matters_while_calls_are_timed(steady, late, behind):
    found, _ = steady(6.0, late)
    assert (found is None) is behind


def test_a_batch_goes_ahead_and_two_are_timed_however_short_the_time(steady):
    assert steady(0.0)[0] == 600.0 / 20


def test_it_tells_how_many_calls_are_finished(steady):
    told: list[int] = []
    steady(4.0, done=told.append)
    assert told == [0, 10, 20, 30]


def test_a_contestant_that_timed_out_leaves_no_error_for_the_next(monkeypatch):
    errors = {0: 0, 1: 7}

    def raise_poll_error(_gpus: Any, gpu: int, _pointer: int) -> None:
        if errors[gpu]:
            raise PipelineTimeoutError("waited in vain")

    monkeypatch.setattr(timing, "raise_poll_error", raise_poll_error)
    timer: Any = object.__new__(Timer)
    timer._gpus = SimpleNamespace(
        sync=lambda: None, fill=lambda gpu, _pointer, byte, _nbytes: errors.update({gpu: byte})
    )
    timer._error, timer._start, timer._end = [1, 2], 0.0, 0.5
    with pytest.raises(PipelineTimeoutError):
        timer._timed_us()
    assert timer._timed_us() == 500.0


def test_the_gate_at_the_end_of_a_load_is_closed_as_long_as_it_is_told(monkeypatch):
    closed: list[float] = []
    timer: Any = object.__new__(Timer)
    timer._gpus = SimpleNamespace(sync=lambda: None)
    timer._marks = list
    monkeypatch.setattr(timing.time, "monotonic", iter(range(1000)).__next__)

    def gated(_call: Any, calls: int, *, dependent: bool, least_s: float = 0.0):
        assert not dependent
        closed.append(least_s)
        return 1e5 * calls, 0.0

    timer._gated = gated
    loaded = timer.load(lambda _: None, 10, 5.0, least_s=0.006)
    assert closed == [0.0, 0.006]
    assert 0 < loaded.duty <= 1
