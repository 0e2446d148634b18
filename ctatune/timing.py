"""Times chains of dependent calls: device-side barrier between calls, floor subtracted.

A chain is enqueued before it begins: behind the chain before it (`Timer.steady`) or behind a closed
gate (`Timer.chain`), where GPUs rest and then run faster than under load for tens of milliseconds.
"""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from cuda.core import EventOptions

from ctatune.abi import ERROR, POLL_TIMEOUT_NS, raise_poll_error
from ctatune.errors import PipelineTimeoutError
from ctatune.gpus import LINE_BYTES, Arena, Gpus

Call = Callable[[int], None]  # enqueue one call on the operand set of that number

CHAIN_US = 10_000.0  # a chain should last this long: thousands of ticks of the event clock
MIN_CALLS = 8
# All of a chain waits at the gate, and a stream holds about 1,024 launches, copies, events and
# waits: more would block the host before it opens the gate.
QUEUE = 1000
# Of them a call takes on a stream at most: two products in split-K with their sums and clears, what
# NCCL enqueues around its kernel, and the barrier.
LAUNCHES = 10
LOAD_SECONDS = 1.0  # until clocks have settled under the power limit


@dataclass(frozen=True, slots=True)
class Chain:
    """One timed chain: latency a call with the floor subtracted, and the floor, microseconds."""

    latency_us: float
    floor_us: float
    closed_s: float = 0.0  # how long its gate held the GPUs


class Loaded(NamedTuple):
    """Calls made under load, and the part of the time in which GPUs worked on them."""

    calls: int
    duty: float


class Timer:
    """Chains on the streams of `gpus`. All methods meet at the same barrier after each call."""

    def __init__(self, gpus: Gpus, arena: Arena) -> None:
        self._gpus = gpus
        everyone = range(len(gpus))
        self._state = [arena.zeros(gpu, 2 * LINE_BYTES) for gpu in everyone]
        self._error = [arena.zeros(gpu, ERROR.itemsize) for gpu in everyone]
        counters = np.array(self._state, dtype=np.uint64)
        peers = [arena.upload(gpu, counters) for gpu in everyone]
        self._meet = [
            gpus.launcher(
                "barrier",
                gpu,
                *(ctypes.c_uint64(peers[gpu]), ctypes.c_int32(len(gpus))),
                *(ctypes.c_uint64(self._state[gpu]), ctypes.c_uint64(self._error[gpu])),
                ctypes.c_int64(POLL_TIMEOUT_NS),
            )
            for gpu in everyone
        ]
        self._empty = [gpus.launcher("nothing", gpu) for gpu in everyone]
        gpus.use(0)
        timed = EventOptions(timing_enabled=True)
        self._start, self._end = (gpus.devices[0].create_event(timed) for _ in range(2))

    def _barrier(self) -> None:
        for meet in self._meet:
            meet()

    def _nothing(self, _: int) -> None:
        for launch in self._empty:
            launch()

    def chain_us(self, call: Call, calls: int, *, dependent: bool = True) -> float:
        """Time of `calls` calls in microseconds, from the gate to the last barrier."""
        return self._gated(call, calls, dependent=dependent)[0]

    def _gated(
        self, call: Call, calls: int, *, dependent: bool = True, least_s: float = 0.0
    ) -> tuple[float, float]:
        """`chain_us` behind a gate that is closed for `least_s` at least, and how long it was."""
        with self._gpus.gated():
            closed = time.monotonic()
            self._record(self._start)
            self.enqueue(call, calls, dependent=dependent)
            self._record(self._end)
            time.sleep(max(0.0, closed + least_s - time.monotonic()))
            closed_s = time.monotonic() - closed
        return self._timed_us(), closed_s

    def enqueue(self, call: Call, calls: int, *, dependent: bool = True) -> None:
        """Enqueue calls and, after each or only the last, the barrier of all GPUs."""
        for i in range(calls):
            call(i)
            if dependent:
                self._barrier()
        if not dependent:
            self._barrier()

    def _timed_us(self) -> float:
        """Time between the two events, when all is done."""
        self._gpus.sync()
        try:
            for gpu, error in enumerate(self._error):
                raise_poll_error(self._gpus, gpu, error)
        except PipelineTimeoutError:
            for gpu, error in enumerate(self._error):  # who comes next is not to blame
                self._gpus.fill(gpu, error, 0, ERROR.itemsize)
            raise
        return 1e3 * (self._end - self._start)

    def _record(self, event: object) -> None:
        self._gpus.use(0)
        self._gpus.streams[0].record(event)

    def calls_for(self, call: Call, launches: int = LAUNCHES) -> int:
        """How many calls make a chain of about CHAIN_US; each takes `launches` of a stream."""
        one = self.chain_us(call, MIN_CALLS) / MIN_CALLS
        return int(min(QUEUE // launches, max(MIN_CALLS, CHAIN_US / one)))

    def chain(self, call: Call, calls: int, *, least_s: float = 0.0) -> Chain:
        """A chain of calls behind a gate that is closed for `least_s` at least."""
        total_us, closed_s = self._gated(call, calls, least_s=least_s)
        return self.less_floor(total_us / calls, calls, closed_s)

    def less_floor(self, call_us: float, calls: int, closed_s: float = 0.0) -> Chain:
        """A chain whose calls took `call_us`, less what empty ones take in as long a chain now."""
        floor_us = self.chain_us(self._nothing, calls) / calls
        return Chain(call_us - floor_us, floor_us, closed_s)

    def steady(
        self,
        call: Call,
        calls: int,
        seconds: float,
        done: Callable[[int], None] | None = None,
    ) -> float | None:
        """What a call takes, floor included, in microseconds: chains without a gate for `seconds`,
        each enqueued while the one before it runs, of which the second half is timed. None where
        the host fell behind. Begins and ends with idle streams.

        `done` is told after each chain how many calls are finished.

        Where two chains overfill a stream the host waits for the GPUs, which have what they need.
        """
        made = timed = 0
        ahead, running, begin = True, [], time.monotonic()
        while made < 3 * calls or time.monotonic() < begin + seconds:
            if made < 2 * calls or time.monotonic() < begin + seconds / 2:
                self._record(self._start)  # again: only what follows counts
                timed, ahead = 0, True
            self.enqueue(call, calls)
            ahead = ahead and not any(mark.is_done for mark in running)
            running = self._after(running)
            if done:
                done(made)
            made, timed = made + calls, timed + calls
        self._record(self._end)
        total_us = self._timed_us()
        return total_us / timed if ahead else None

    def single_shot_us(self, call: Call) -> float:
        """One gated call and the join of all GPUs, floor included: median of five."""
        return float(np.median([self.chain_us(call, 1) for _ in range(5)]))

    def load(
        self,
        call: Call,
        calls: int,
        seconds: float = LOAD_SECONDS,
        *,
        duty: float = 1.0,
        least_s: float = 0.0,
    ) -> Loaded:
        """Keep the GPUs busy with the method until clocks have settled, `duty` of the time at most.

        A batch of calls is enqueued while the one before runs, so that the host hides behind the
        GPUs. What a batch takes of them says one at the end, at the clock of then, behind a gate
        that is closed for `least_s` at least. Begins and ends with idle streams.
        """
        batch_us = self.chain_us(call, calls, dependent=False)
        batches, running, begin = 0, [], time.monotonic()
        while time.monotonic() - begin < seconds:
            for i in range(calls):
                call(i)
            running = self._after(running)
            batches += 1
            if duty < 1.0:  # others cannot keep them busier
                elapsed = time.monotonic() - begin
                time.sleep(max(0.0, 1e-6 * batches * batch_us / duty - elapsed))
        self._gpus.sync()
        elapsed = time.monotonic() - begin
        batch_us, _ = self._gated(call, calls, dependent=False, least_s=least_s)
        busy = 1e-6 * batches * batch_us
        return Loaded(calls * (batches + 2), min(1.0, busy / elapsed))

    def _after(self, before: list[Any]) -> list[Any]:
        """Marks behind what is enqueued, when those before are passed."""
        marks = self._marks()
        for mark in before:
            mark.sync()
        return marks

    def _marks(self) -> list[Any]:
        """An event on each stream, after what is enqueued."""
        marks = [self._gpus.event(gpu) for gpu in range(len(self._gpus))]
        for gpu, mark in enumerate(marks):
            self._gpus.use(gpu)
            self._gpus.streams[gpu].record(mark)
        return marks
