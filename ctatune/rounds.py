"""The rounds of a race: contestants that take turns on the GPUs, until they are told apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from ctatune.contestants import Contestant
from ctatune.errors import PipelineTimeoutError
from ctatune.stats import APART, median_interval
from ctatune.telemetry import Telemetry
from ctatune.timing import LOAD_SECONDS, Chain, Timer

MIN_ROUNDS, MAX_ROUNDS, FINAL_SECONDS = 12, 60, 12.0
TIE = 0.005  # half-width of the interval of the log-ratio at which two methods are told apart
NEXT_LOAD_SECONDS = 0.3  # of load where another method has just loaded the GPUs
COUNTED_SECONDS = 0.8  # of load in which joules are counted
MIN_STEPS = 5  # of the counter, 0.1 s apart and each seen up to a chain (10 ms) late
TURN_SECONDS = 0.1  # half of it is timed; behind a gate, all of it loads the GPUs for a chain
MAX_LATE = 3  # rounds in which a host fell behind: then all wait behind a gate


class Joules:
    """Joules a call, between the first and the last step of NVML's counter of each GPU in a turn.

    The counter moves ten times a second.
    """

    def __init__(self, counters: Callable[[], list[float]]) -> None:
        self._counters = counters
        self._seen = [[(joules, 0)] for joules in counters()]

    def done(self, calls: int) -> None:
        """To be told every few milliseconds how many calls of the turn are done. A reading that
        NVML does not give is no step."""
        for seen, joules in zip(self._seen, self._counters(), strict=False):
            if joules != seen[-1][0]:
                seen.append((joules, calls))

    @property
    def of_a_call(self) -> float | None:
        """Of all GPUs; None where a counter moved too seldom."""
        if not self._seen or min(map(len, self._seen)) < 2 + MIN_STEPS:
            return None
        spans = [(seen[1], seen[-1]) for seen in self._seen]
        return sum((last[0] - first[0]) / (last[1] - first[1]) for first, last in spans)


class Runner:
    """One contestant of a race: its chains, and what a call of it takes."""

    def __init__(self, timer: Timer, telemetry: Telemetry, contestant: Contestant) -> None:
        self._timer, self._telemetry, self._contestant = timer, telemetry, contestant
        self._calls = timer.calls_for(contestant.call, contestant.launches)
        self._joules: Joules | None = None
        self.duty, self._closed_s = 0.0, 0.0

    def steady(self, seconds: float) -> Chain | None:
        """A chain of the second half of `seconds`; None where the host fell behind.

        Raises: PipelineTimeoutError if a GPU waited in vain.
        """
        return self._steady(seconds, None)

    def counted(self, seconds: float) -> Chain | None:
        """The same, and joules are counted. Raises as `steady` does."""
        self._joules = Joules(self._telemetry.energies_j)
        return self._steady(seconds, self._joules.done)

    def _steady(self, seconds: float, done: Callable[[int], None] | None) -> Chain | None:
        call_us = self._timer.steady(self._contestant.call, self._calls, seconds, done)
        self._contestant.check()
        self.duty = 1.0
        return None if call_us is None else self._timer.less_floor(call_us, self._calls)

    def gated(self, seconds: float, duty: float = 1.0, least_s: float = 0.0) -> Chain:
        """A chain behind a gate after `seconds` of load. Raises as `steady` does."""
        call = self._contestant.call
        self.duty = self._timer.load(call, self._calls, seconds, duty=duty, least_s=least_s).duty
        chain = self._timer.chain(call, self._calls, least_s=least_s)
        self._contestant.check()
        self._closed_s = chain.closed_s
        return chain

    def state(self) -> dict[str, object]:
        """`duty` under load; `closed_s`, how long GPUs rested before the last chain; `joules`,
        of a call on all GPUs in the turn where they were counted, if NVML counts them.
        """
        state: dict[str, object] = {"duty": self.duty, "closed_s": self._closed_s}
        if self._joules and (joules := self._joules.of_a_call) is not None:
            state["joules"] = joules
        return state


Turn = Callable[[Runner], Chain | None]


class Rounds:
    """Rounds of all contestants in random order, until all are told from the best, or late.

    Where every host keeps the GPUs busy, no contestant finds them rested. Where one does not, all
    load for the part of the time that the slowest manages, and wait behind a gate for as long. A
    round in which a GPU was slowed down or shared, or a host fell behind, does not count.

    After `run`, `chains` are those of each, and `lost` says who left on the way, and why.
    """

    def __init__(
        self, contestants: dict[int, Contestant], timer: Timer, telemetry: Telemetry, seed: int
    ) -> None:
        self._telemetry = telemetry
        self._order = np.random.default_rng(seed)
        self._field: dict[int, Runner] = {}
        self.lost: dict[int, str] = {}
        for i, contestant in contestants.items():
            try:
                self._field[i] = Runner(timer, telemetry, contestant)
            except PipelineTimeoutError as error:  # in its first chain
                self.lost[i] = str(error)
        self.chains: dict[int, list[Chain]] = {i: [] for i in contestants}
        self._take: Turn = lambda runner: runner.steady(TURN_SECONDS)
        self._late = 0

    def state(self, i: int) -> dict[str, object]:
        """What `Runner.state` says of a contestant that was not lost."""
        return self._field[i].state()

    def run(self) -> None:
        everyone = list(self._field)
        made = self._turns(everyone[:1], lambda runner: runner.counted(LOAD_SECONDS))
        made |= self._turns(everyone[1:], lambda runner: runner.counted(COUNTED_SECONDS))
        late = [i for i, chain in made.items() if chain is None]  # once may be an accident
        if None in self._turns(late, lambda runner: runner.steady(NEXT_LOAD_SECONDS)).values():
            self._close_the_gate()
        end = time.monotonic() + FINAL_SECONDS
        for left in range(MAX_ROUNDS, 0, -1):
            self._round(left)
            kept = {i: self.chains[i] for i in self._here}
            if min(map(len, kept.values()), default=MIN_ROUNDS) < MIN_ROUNDS:
                continue
            if time.monotonic() > end or _told_apart(kept):
                break

    def _round(self, left: int) -> None:
        made = self._turns(self._order.permutation(self._here).tolist(), self._take)
        chains = {i: chain for i, chain in made.items() if chain}
        if len(chains) < len(made):
            self._late += 1
            if self._late == MAX_LATE and left > MIN_ROUNDS:
                self._close_the_gate()
        elif not self._telemetry.marks(self._telemetry.read()):
            for i, chain in chains.items():
                self.chains[i].append(chain)

    @property
    def _here(self) -> list[int]:
        return [i for i in self._field if i not in self.lost]

    def _turns(self, some: Sequence[int], take: Turn) -> dict[int, Chain | None]:
        made: dict[int, Chain | None] = {}
        for i in some:
            try:
                made[i] = take(self._field[i])
            except PipelineTimeoutError as error:  # its flags are of no use any more
                self.lost[i] = str(error)
        return made

    def _close_the_gate(self) -> None:
        """Begin anew behind a gate; a turn of each says what is the same for all."""
        made = self._turns(self._here, lambda runner: runner.gated(NEXT_LOAD_SECONDS))
        duty = min((self._field[i].duty for i in made), default=1.0)
        closed_s = max((chain.closed_s for chain in made.values() if chain), default=0.0)
        self._take = lambda runner: runner.gated(TURN_SECONDS, duty, closed_s)
        self.chains = {i: [] for i in self.chains}


def _told_apart(rounds: dict[int, list[Chain]]) -> bool:
    """Whether each contestant is clearly slower than the best one, or as good as equal to it."""
    if not rounds:
        return True
    times = {i: np.log([chain.latency_us for chain in chains]) for i, chains in rounds.items()}
    best = min(times, key=lambda i: float(np.median(times[i])))
    for i, values in times.items():
        _, low, high = median_interval(values - times[best])
        if i != best and low < APART and (high - low) / 2 > TIE:
            return False
    return True
