"""Times chains of dependent calls: gate, device-side barrier between calls, floor subtracted."""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from cuda.core import EventOptions

from ctatune.abi import ERROR, POLL_TIMEOUT_NS, raise_poll_error
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
        self._peers = [arena.upload(gpu, counters) for gpu in everyone]
        gpus.use(0)
        timed = EventOptions(timing_enabled=True)
        self._start, self._end = (gpus.devices[0].create_event(timed) for _ in range(2))

    def _barrier(self) -> None:
        count = np.int32(len(self._gpus))
        for gpu, state in enumerate(self._state):
            args = (self._peers[gpu], count, state, self._error[gpu], np.int64(POLL_TIMEOUT_NS))
            self._gpus.support("barrier", gpu, 1, 32, *args)

    def _nothing(self, _: int) -> None:
        for gpu in range(len(self._gpus)):
            self._gpus.support("nothing", gpu, 1, 32)

    def chain_us(self, call: Call, calls: int, *, dependent: bool = True) -> float:
        """Time of `calls` calls in microseconds, from the gate to the last barrier."""
        with self._gpus.gated():
            self._record(self._start)
            for i in range(calls):
                call(i)
                if dependent:
                    self._barrier()
            if not dependent:
                self._barrier()
            self._record(self._end)
        self._gpus.sync()
        for gpu, error in enumerate(self._error):
            raise_poll_error(self._gpus, gpu, error)
        return 1e3 * (self._end - self._start)

    def _record(self, event: object) -> None:
        self._gpus.use(0)
        self._gpus.streams[0].record(event)

    def calls_for(self, call: Call, launches: int = LAUNCHES) -> int:
        """How many calls make a chain of about CHAIN_US; each takes `launches` of a stream."""
        one = self.chain_us(call, MIN_CALLS) / MIN_CALLS
        return int(min(QUEUE // launches, max(MIN_CALLS, CHAIN_US / one)))

    def chain(self, call: Call, calls: int) -> Chain:
        """One round: a chain of calls, right after it the same chain of empty calls."""
        total = self.chain_us(call, calls)
        floor = self.chain_us(self._nothing, calls)
        return Chain(latency_us=(total - floor) / calls, floor_us=floor / calls)

    def single_shot_us(self, call: Call) -> float:
        """One gated call and the join of all GPUs, floor included: median of five."""
        return float(np.median([self.chain_us(call, 1) for _ in range(5)]))

    def load(
        self, call: Call, calls: int, seconds: float = LOAD_SECONDS, *, duty: float = 1.0
    ) -> Loaded:
        """Keep the GPUs busy with the method until clocks have settled, `duty` of the time at most.

        A batch of calls is enqueued while the one before runs, so that the host hides behind the
        GPUs. What a batch takes of them says a gated one at the end, at the clock of then. Begins
        and ends with idle streams.
        """
        batch_us = self.chain_us(call, calls, dependent=False)
        batches, running, begin = 0, None, time.monotonic()
        while time.monotonic() - begin < seconds:
            for i in range(calls):
                call(i)
            before, running = running, self._marks()
            batches += 1
            if before:
                for mark in before:
                    mark.sync()
            if duty < 1.0:  # others cannot keep them busier
                elapsed = time.monotonic() - begin
                time.sleep(max(0.0, 1e-6 * batches * batch_us / duty - elapsed))
        self._gpus.sync()
        elapsed = time.monotonic() - begin
        busy = 1e-6 * batches * self.chain_us(call, calls, dependent=False)
        return Loaded(calls * (batches + 2), min(1.0, busy / elapsed))

    def _marks(self) -> list[Any]:
        """An event on each stream, after what is enqueued."""
        marks = [self._gpus.event(gpu) for gpu in range(len(self._gpus))]
        for gpu, mark in enumerate(marks):
            self._gpus.use(gpu)
            self._gpus.streams[gpu].record(mark)
        return marks
