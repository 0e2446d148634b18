"""How contestants take turns, on a timer that is a fake."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ctatune.errors import PipelineTimeoutError
from ctatune.rounds import MAX_LATE, MAX_ROUNDS, MIN_ROUNDS, MIN_STEPS, Joules, Rounds
from ctatune.timing import Chain, Loaded

LATENCY_US = {"fast": 50.0, "slow": 60.0, "late": 55.0, "broken": 1.0, "cracked": 1.0}


class FakeTimer:
    """Contestants are their names: "dead" times out, the host of "late" falls behind in the turns
    `late`, and clocks are full where a gate was closed."""

    def __init__(self, late: range = range(1000)) -> None:
        self._late, self._turns = late, Counter[str]()
        self.done = 0
        self.loads: list[tuple[str, float]] = []
        self.closed_s: list[float] = []

    def calls_for(self, call: Any, _: int) -> int:
        if call == "stillborn":
            raise PipelineTimeoutError("waited in its first chain")
        return 10

    def steady(self, call: Any, calls: int, _seconds: float, done: Any) -> float | None:
        if call == "dead":
            raise PipelineTimeoutError("waited in vain")
        for i in range(MIN_STEPS + 3):
            self.done += calls
            if done:
                done(i * calls)
        turn, self._turns[call] = self._turns[call], self._turns[call] + 1
        return None if call == "late" and turn in self._late else 1.1 * LATENCY_US[call]

    def less_floor(self, call_us: float, _: int) -> Chain:
        return Chain(call_us, 5.0)

    def load(self, call: Any, calls: int, seconds: float, *, duty: float, least_s: float) -> Loaded:
        self.loads.append((call, duty))
        self.closed_s.append(least_s)
        return Loaded(calls * round(10 * seconds), 0.7 if call == "late" else duty)

    def chain(self, call: Any, _: int, *, least_s: float) -> Chain:
        self.closed_s.append(least_s)
        own_s = 0.006 if call == "late" else 0.001
        return Chain(LATENCY_US[call], 5.0, max(least_s, own_s))


def contestant(name: str, timer: FakeTimer) -> Any:
    def check() -> None:
        if name == "broken" or (name == "cracked" and timer.loads):
            raise PipelineTimeoutError("a poll ended early")

    return SimpleNamespace(call=name, launches=10, check=check)


def raced(names: tuple[str, ...], timer: FakeTimer, marks: Any = lambda _: []) -> Rounds:
    """A race of two GPUs whose counters gain 1 J and 2 J each 10 calls."""
    telemetry: Any = SimpleNamespace(
        energies_j=lambda: [timer.done / 10, timer.done / 5], read=lambda: None, marks=marks
    )
    contestants = {i: contestant(name, timer) for i, name in enumerate(names)}
    rounds = Rounds(contestants, timer, telemetry, 1)  # type: ignore[arg-type]
    rounds.run()
    return rounds


def latencies(rounds: Rounds) -> list[set[float]]:
    return [{round(chain.latency_us, 1) for chain in chains} for chains in rounds.chains.values()]


def test_who_times_out_leaves_the_race_and_the_others_go_on():
    names = ("dead", "stillborn", "broken", "fast", "slow")
    rounds = raced(names, timer := FakeTimer())
    assert rounds.lost == {
        0: "waited in vain",
        1: "waited in its first chain",
        2: "a poll ended early",
    }
    assert [len(chains) for chains in rounds.chains.values()] == [0, 0, 0, MIN_ROUNDS, MIN_ROUNDS]
    assert latencies(rounds)[3:] == [{55.0}, {66.0}]
    assert not timer.loads  # none behind a gate
    wanted = {"duty": 1.0, "closed_s": 0.0, "joules": 0.1 + 0.2}
    assert [rounds.state(i) for i in (3, 4)] == [pytest.approx(wanted)] * 2
    assert not raced(("dead", "stillborn"), FakeTimer()).chains[0]


def test_behind_a_gate_all_rest_and_load_as_the_slowest_host_does():
    rounds = raced(("fast", "late", "slow"), timer := FakeTimer())
    assert latencies(rounds) == [{50.0}, {55.0}, {60.0}]
    first, rest = timer.loads[:3], timer.loads[3:]
    assert first == [(name, 1.0) for name in ("fast", "late", "slow")]
    assert {duty for _, duty in rest} == {0.7}
    assert set(timer.closed_s[6:]) == {0.006}  # before and after the load
    assert {rounds.state(i)["closed_s"] for i in range(3)} == {0.006}


def test_one_late_turn_costs_a_round_and_a_few_close_the_gate():
    rounds = raced(("fast", "late"), timer := FakeTimer(range(1)))
    assert not timer.loads  # the first turn of a host may be late once
    rounds = raced(("fast", "late"), timer := FakeTimer(range(3, 3 + MAX_LATE - 1)))
    assert [len(chains) for chains in rounds.chains.values()] == 2 * [MIN_ROUNDS]
    assert latencies(rounds) == [{55.0}, {60.5}]
    assert not timer.loads
    rounds = raced(("fast", "late"), timer := FakeTimer(range(3, 3 + MAX_LATE)))
    assert latencies(rounds) == [{50.0}, {55.0}]  # none of the rounds before
    assert timer.loads


def test_rounds_of_a_gpu_that_was_slowed_down_do_not_count():
    rounds = raced(("fast", "slow"), FakeTimer(), marks=lambda _: ["hot"])
    assert [len(chains) for chains in rounds.chains.values()] == [0, 0]


def test_a_gate_is_not_closed_where_too_few_rounds_are_left():
    """Rounds that were made stay; a turn of a host is one late or two before each round."""
    late = range(1 + MAX_ROUNDS - MIN_ROUNDS, 1000)
    rounds = raced(("fast", "late"), timer := FakeTimer(late), marks=HotAtFirst())
    assert not timer.loads
    assert [len(chains) for chains in rounds.chains.values()] == [MAX_ROUNDS - MIN_ROUNDS - 40] * 2


class HotAtFirst:
    """Marks the first 40 rounds."""

    def __init__(self) -> None:
        self.rounds = 0

    def __call__(self, _: Any) -> list[str]:
        self.rounds += 1
        return ["hot"] if self.rounds <= 40 else []


def test_what_is_broken_leaves_behind_a_gate_too():
    rounds = raced(("fast", "late", "cracked"), timer := FakeTimer())
    assert rounds.lost == {2: "a poll ended early"}
    assert timer.loads
    assert [len(chains) for chains in rounds.chains.values()] == [MIN_ROUNDS, MIN_ROUNDS, 0]


def test_joules_are_between_the_first_and_the_last_step_of_each_counter():
    """Read when a turn begins and after each 10 calls: when the step before began is unknown."""
    one = [100.0, 100.0, 130.0, 130.0, 150.0, 160.0, 170.0, 180.0, 190.0, 190.0]
    two = [0.0, 7.0, 9.0, 10.0, 12.0, 14.0, 14.0, 27.0, 27.0, 29.0]
    readings = map(list, zip(one, two, strict=True))
    joules = Joules(lambda: next(readings))
    for calls in range(10, 80, 10):
        joules.done(calls)
        assert joules.of_a_call is None  # too few steps
    joules.done(80)
    joules.done(90)
    assert joules.of_a_call == (190.0 - 130.0) / (80 - 20) + (29.0 - 7.0) / (90 - 10)
    silent = Joules(list)
    silent.done(10)
    assert silent.of_a_call is None
