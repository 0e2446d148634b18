"""How contestants take turns, on a timer that is a fake."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ctatune.errors import PipelineTimeoutError
from ctatune.rounds import MAX_LATE, MIN_ROUNDS, Rounds, Runner
from ctatune.timing import Chain, Loaded, Steady

LATENCY_US = {"fast": 50.0, "slow": 60.0, "late": 55.0, "dead": 1.0}


class FakeTimer:
    """Contestants are their names: "dead" times out, the host of "late" falls behind in the turns
    `late`, and clocks are full where a gate was closed."""

    def __init__(self, late: range = range(1000)) -> None:
        self._late, self._turns = late, Counter[str]()
        self.loads: list[tuple[str, float]] = []
        self.closed_s: list[float] = []

    def calls_for(self, *_: object) -> int:
        return 10

    def steady(self, call: Any, calls: int, seconds: float) -> Steady:
        if call == "dead":
            raise PipelineTimeoutError("waited in vain")
        turn, self._turns[call] = self._turns[call], self._turns[call] + 1
        behind = call == "late" and turn in self._late
        return Steady(calls * round(10 * seconds), None if behind else 1.1 * LATENCY_US[call])

    def less_floor(self, call_us: float, _: int) -> Chain:
        return Chain(call_us, 5.0)

    def load(self, call: Any, calls: int, seconds: float, *, duty: float) -> Loaded:
        self.loads.append((call, duty))
        return Loaded(calls * round(10 * seconds), 0.7 if call == "late" else duty)

    def chain(self, call: Any, _: int, *, least_s: float) -> Chain:
        self.closed_s.append(least_s)
        own_s = 0.006 if call == "late" else 0.001
        return Chain(LATENCY_US[call], 5.0, max(least_s, own_s))


def raced(
    names: tuple[str, ...], timer: FakeTimer, marks: Any = lambda _: []
) -> tuple[Rounds, list[Runner]]:
    quiet: Any = SimpleNamespace(energy_j=lambda: None, read=lambda: None, marks=marks)
    contestants: Any = [SimpleNamespace(call=name, launches=10) for name in names]
    runners = [Runner(timer, quiet, contestant) for contestant in contestants]  # type: ignore[arg-type]
    rounds = Rounds(dict(enumerate(runners)), quiet, 1)
    rounds.run()
    return rounds, runners


def latencies(rounds: Rounds) -> list[set[float]]:
    return [{round(chain.latency_us, 1) for chain in chains} for chains in rounds.chains.values()]


def test_who_times_out_leaves_the_race_and_the_others_go_on():
    rounds, runners = raced(("dead", "fast", "slow"), timer := FakeTimer())
    assert rounds.lost == {0: "waited in vain"}
    assert [len(rounds.chains[i]) for i in range(3)] == [0, MIN_ROUNDS, MIN_ROUNDS]
    assert latencies(rounds)[1:] == [{55.0}, {66.0}]
    assert not timer.loads  # none behind a gate
    assert [runner.state() for runner in runners[1:]] == 2 * [{"duty": 1.0, "closed_s": 0.0}]


def test_behind_a_gate_all_rest_and_load_as_the_slowest_host_does():
    rounds, runners = raced(("fast", "late", "slow"), timer := FakeTimer())
    assert latencies(rounds) == [{50.0}, {55.0}, {60.0}]
    first, rest = timer.loads[:3], timer.loads[3:]
    assert first == [(name, 1.0) for name in ("fast", "late", "slow")]
    assert {duty for _, duty in rest} == {0.7}
    assert set(timer.closed_s[3:]) == {0.006}
    assert {runner.state()["closed_s"] for runner in runners} == {0.006}


def test_one_late_turn_costs_a_round_and_a_few_close_the_gate():
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


@pytest.mark.parametrize(
    ("counter", "joules"), [([100.0, 350.0, 350.0, 400.0], 3.0), ([None, None, 1.0, 2.0], None)]
)
def test_energy_is_a_call_of_all_load_segments(counter, joules):
    readings = iter(counter)
    telemetry: Any = SimpleNamespace(energy_j=lambda: next(readings))
    timer: Any = FakeTimer()
    runner = Runner(timer, telemetry, SimpleNamespace(call="late", launches=10))  # type: ignore[arg-type]
    assert runner.steady(0.8) is None
    runner.gated(0.2, 0.5)
    assert runner.state() == {"duty": 0.7, "closed_s": 0.006} | (
        {"energy_j": joules} if joules else {}
    )
