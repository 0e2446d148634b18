"""The rounds of a race: contestants that take turns on the GPUs, until they are told apart."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ctatune.contestants import Contestant
from ctatune.errors import PipelineTimeoutError
from ctatune.stats import APART, median_interval
from ctatune.telemetry import Telemetry
from ctatune.timing import LOAD_SECONDS, Chain, Timer

MIN_ROUNDS, MAX_ROUNDS, FINAL_SECONDS = 12, 60, 12.0
TIE = 0.005  # half-width of the interval of the log-ratio at which two methods are told apart
NEXT_LOAD_SECONDS = 0.3  # of load where another method has just loaded the GPUs
TURN_SECONDS = 0.1  # half of it is timed; behind a gate, all of it loads the GPUs for a chain
MAX_LATE = 3  # rounds in which a host fell behind: then all wait behind a gate


class Runner:
    """One contestant of a race: its chains, and what a call of it takes."""

    def __init__(self, timer: Timer, telemetry: Telemetry, contestant: Contestant) -> None:
        self._timer, self._telemetry = timer, telemetry
        self._call = contestant.call
        self._calls = timer.calls_for(contestant.call, contestant.launches)
        self._made, self._energy_j, self.duty = 0, 0.0, 0.0
        self._closed_s = 0.0

    def steady(self, seconds: float) -> Chain | None:
        """A chain of the second half of `seconds`; None where the host fell behind."""
        with self._counted():
            steady = self._timer.steady(self._call, self._calls, seconds)
            self._made, self.duty = self._made + steady.calls, 1.0
        call_us = steady.call_us
        return None if call_us is None else self._timer.less_floor(call_us, self._calls)

    def gated(self, seconds: float, duty: float = 1.0, least_s: float = 0.0) -> Chain:
        """A chain behind a gate after `seconds` of load."""
        with self._counted():
            loaded = self._timer.load(self._call, self._calls, seconds, duty=duty)
            self._made, self.duty = self._made + loaded.calls, loaded.duty
        chain = self._timer.chain(self._call, self._calls, least_s=least_s)
        self._closed_s = chain.closed_s
        return chain

    @contextmanager
    def _counted(self) -> Iterator[None]:
        before = self._telemetry.energy_j()
        yield
        after = self._telemetry.energy_j()
        if before is None or after is None:
            self._energy_j = math.nan
        else:
            self._energy_j += after - before

    def state(self) -> dict[str, object]:
        """`duty` under load; `closed_s`, how long GPUs rested before the last chain; `energy_j`,
        joules a call of all GPUs held, pauses included, where NVML counts them.
        """
        state: dict[str, object] = {"duty": self.duty, "closed_s": self._closed_s}
        if self._made and not math.isnan(self._energy_j):
            state["energy_j"] = self._energy_j / self._made
        return state


Turn = Callable[[Runner], Chain | None]


class Rounds:
    """Rounds of all contestants in random order, until all are told from the best, or late.

    Where every host keeps the GPUs busy, no contestant finds them rested. Where one does not, all
    load for the part of the time that the slowest manages, and wait behind a gate for as long. A
    round in which a GPU was slowed down or shared, or a host fell behind, does not count.

    After `run`, `chains` are those of each, and `lost` says who left on the way, and why.
    """

    def __init__(self, field: dict[int, Runner], telemetry: Telemetry, seed: int) -> None:
        self._field, self._telemetry = field, telemetry
        self._order = np.random.default_rng(seed)
        self.chains: dict[int, list[Chain]] = {i: [] for i in field}
        self.lost: dict[int, str] = {}
        self._take: Turn = lambda runner: runner.steady(TURN_SECONDS)
        self._late = 0

    def run(self) -> None:
        first, *others = self._field
        made = self._turns([first], lambda runner: runner.steady(LOAD_SECONDS))
        made |= self._turns(others, lambda runner: runner.steady(NEXT_LOAD_SECONDS))
        if None in made.values():
            self._close_the_gate()
        end = time.monotonic() + FINAL_SECONDS
        for _ in range(MAX_ROUNDS):
            self._round()
            kept = {i: self.chains[i] for i in self._here}
            if min(map(len, kept.values()), default=MIN_ROUNDS) < MIN_ROUNDS:
                continue
            if time.monotonic() > end or _told_apart(kept):
                break

    def _round(self) -> None:
        made = self._turns(self._order.permutation(self._here).tolist(), self._take)
        chains = {i: chain for i, chain in made.items() if chain}
        if len(chains) < len(made):
            self._late += 1
            if self._late == MAX_LATE:
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
        self.chains = {i: [] for i in self._field}


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
