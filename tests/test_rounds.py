"""How contestants take turns, on a timer that is a fake."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from ctatune.errors import PipelineTimeoutError
from ctatune.rounds import MAX_LATE, MIN_ROUNDS, Joules, Rounds, Runner
from ctatune.timing import Chain, Loaded

LATENCY_US = {"fast": 50.0, "slow": 60.0, "late": 55.0, "dead": 1.0, "broken": 1.0}


class FakeTimer:
    """Contestants are their names: "dead" times out, the host of "late" falls behind in the turns
    `late`, and clocks are full where a gate was closed."""

    def __init__(self, late: range = range(1000)) -> None:
        self._late, self._turns = late, Counter[str]()
        self.loads: list[tuple[str, float]] = []
        self.closed_s: list[float] = []

    def calls_for(self, *_: object) -> int:
        return 10

    def steady(self, call: Any, _calls: int, _seconds: float, _done: Any) -> float | None:
        if call == "dead":
            raise PipelineTimeoutError("waited in vain")
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


def contestant(name: str) -> Any:
    def check() -> None:
        if name == "broken":
            raise PipelineTimeoutError("a poll ended early")

    return SimpleNamespace(call=name, launches=10, check=check)


def raced(
    names: tuple[str, ...], timer: FakeTimer, marks: Any = lambda _: []
) -> tuple[Rounds, list[Runner]]:
    quiet: Any = SimpleNamespace(energy_j=lambda: None, read=lambda: None, marks=marks)
    contestants: Any = [contestant(name) for name in names]
    runners = [Runner(timer, quiet, contestant) for contestant in contestants]  # type: ignore[arg-type]
    rounds = Rounds(dict(enumerate(runners)), quiet, 1)
    rounds.run()
    return rounds, runners


def latencies(rounds: Rounds) -> list[set[float]]:
    return [{round(chain.latency_us, 1) for chain in chains} for chains in rounds.chains.values()]


def test_who_times_out_leaves_the_race_and_the_others_go_on():
    rounds, runners = raced(("dead", "broken", "fast", "slow"), timer := FakeTimer())
    assert rounds.lost == {0: "waited in vain", 1: "a poll ended early"}
    assert [len(rounds.chains[i]) for i in range(4)] == [0, 0, MIN_ROUNDS, MIN_ROUNDS]
    assert latencies(rounds)[2:] == [{55.0}, {66.0}]
    assert not timer.loads  # none behind a gate
    assert [runner.state() for runner in runners[2:]] == 2 * [{"duty": 1.0, "closed_s": 0.0}]


def test_behind_a_gate_all_rest_and_load_as_the_slowest_host_does():
    rounds, runners = raced(("fast", "late", "slow"), timer := FakeTimer())
    assert latencies(rounds) == [{50.0}, {55.0}, {60.0}]
    first, rest = timer.loads[:3], timer.loads[3:]
    assert first == [(name, 1.0) for name in ("fast", "late", "slow")]
    assert {duty for _, duty in rest} == {0.7}
    assert set(timer.closed_s[6:]) == {0.006}  # before and after the load
    assert {runner.state()["closed_s"] for runner in runners} == {0.006}


def test_one_late_turn_costs_a_round_and_a_few_close_the_gate():
    rounds, _ = raced(("fast", "late"), timer := FakeTimer(range(1)))
    assert not timer.loads  # the first turn of a host may be late once
    rounds, _ = raced(("fast", "late"), timer := FakeTimer(range(3, 3 + MAX_LATE - 1)))
    assert [len(chains) for chains in rounds.chains.values()] == 2 * [MIN_ROUNDS]
    assert latencies(rounds) == [{55.0}, {60.5}]
    assert not timer.loads
    rounds, _ = raced(("fast", "late"), timer := FakeTimer(range(3, 3 + MAX_LATE)))
    assert latencies(rounds) == [{50.0}, {55.0}]  # none of the rounds before
    assert timer.loads


def test_rounds_of_a_gpu_that_was_slowed_down_do_not_count():
    rounds, _ = raced(("fast", "slow"), FakeTimer(), marks=lambda _: ["hot"])
    assert [len(chains) for chains in rounds.chains.values()] == [0, 0]


def test_joules_are_between_steps_of_the_counter_in_each_segment():
    """Read when a segment begins and after each 10 calls: when its first step began is unknown."""
    readings = iter(
        [100.0, 100.0, 130.0, 130.0, 150.0, 190.0, 190.0, *[500.0, 520.0, 520.0, 550.0]]
    )
    joules = Joules(lambda: next(readings))
    assert joules.of_a_call is None
    done = joules.segment()
    for calls in (10, 20, 30, 40, 50, 60):
        done(calls)
    assert joules.of_a_call == (190.0 - 130.0) / (50 - 20)
    done = joules.segment()
    for calls in (10, 20, 30):
        done(calls)
    assert joules.of_a_call == (60.0 + 30.0) / (30 + 20)
    silent = Joules(lambda: None)
    silent.segment()(10)
    assert silent.of_a_call is None
