"""The argument of ctatune/mlp.py in a model of the kernel's protocol: schedules that share Y1 and
have flags of their own, in random interleavings of all CTAs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

CTAS = 2
Step = Iterator[Callable[[], bool]]


class FaultError(Exception):
    """Something was touched that another call still uses, or nothing can go on."""


class Model:
    """GPUs that run `calls` (names of schedules) in order. `up` and `down` have parts of a layer.

    `cta` follows kernels/mlp.cu; a condition that is yielded is awaited. With `reduces`, a GPU
    keeps its Y1 and stores partial sums into that of each other one in `down`.
    """

    def __init__(
        self,
        calls: list[str],
        gpus: int,
        up: set[int],
        down: set[int],
        *,
        replicated: bool = True,
        reduces: bool = False,
    ) -> None:
        self.calls, self.gpus, self.up, self.down = calls, range(gpus), up, down
        self.replicated, self.reduces = replicated, reduces
        self.flags: Counter[tuple[object, ...]] = Counter()
        self.ended = [0] * gpus  # calls
        self.read: Counter[tuple[int, int]] = Counter()  # (call, GPU): tiles of down that are read
        self.stored: Counter[tuple[int, int]] = Counter()  # (call, GPU): tiles of Y1 that are here
        self.y2: Counter[tuple[int, int]] = Counter()

    def receivers(self, gpu: int) -> set[int]:
        """Who gets the Y2 that a GPU computes."""
        if gpu not in self.down:
            return set()
        return set(self.gpus) if self.replicated else {gpu}

    def senders(self, gpu: int) -> int:
        return sum(gpu in self.receivers(g) for g in self.gpus if g != gpu)

    def y1_senders(self, gpu: int) -> int:
        """GPUs that store into the Y1 of a GPU."""
        if self.reduces and gpu not in self.down:
            return 1
        return len(self.up)

    def store_y1(self, call: int, to: int) -> None:
        for before in range(call):
            if self.read[before, to] != CTAS or self.stored[before, to] != CTAS * self.y1_senders(
                to
            ):
                raise FaultError(f"call {call} writes Y1 of GPU {to} which call {before} uses")
        self.stored[call, to] += 1

    def store_y2(self, call: int, to: int) -> None:
        if self.ended[to] < call:
            raise FaultError(
                f"call {call} writes Y2 of GPU {to} before its call {call - 1} has ended"
            )
        self.y2[call, to] += 1

    def epoch(self, call: int) -> int:
        """Calls of the same schedule before this one."""
        return self.calls[:call].count(self.calls[call])

    def send(self, call: int, flag: str, to: int) -> Step:
        """Store into the Y1 of a GPU, and tell it."""
        name, epoch = self.calls[call], self.epoch(call)
        yield lambda: self.flags[name, "started", to] >= epoch
        self.store_y1(call, to)
        yield lambda: True
        self.flags[name, flag, to, epoch % 2] += 1

    def here(self, call: int, flag: str, gpu: int, senders: int) -> Callable[[], bool]:
        name, epoch = self.calls[call], self.epoch(call)
        target = (epoch // 2 + 1) * CTAS * senders
        return lambda: self.flags[name, flag, gpu, epoch % 2] >= target

    def y1(self, gpu: int, call: int) -> Step:
        """What a CTA stores into Y1."""
        for to in sorted({gpu} if self.reduces else self.down) if gpu in self.up else ():
            yield from self.send(call, "panel", to)
        if self.reduces:
            yield self.here(call, "panel", gpu, 1)
            self.read[call, gpu] += gpu not in self.down  # it sums for others alone
            for to in sorted(self.down - {gpu}):
                yield from self.send(call, "partial", to)

    def cta(self, gpu: int, cta: int, call: int) -> Step:
        flags, name, epoch = self.flags, self.calls[call], self.epoch(call)
        if cta == 0:
            flags[name, "started", gpu] += 1
        yield from self.y1(gpu, call)
        if gpu in self.down:
            awaited = "partial" if self.reduces else "panel"
            yield self.here(call, awaited, gpu, len(self.up) - self.reduces)
            yield lambda: True
            self.read[call, gpu] += 1
            for to in sorted(self.receivers(gpu)):
                yield lambda to=to: flags[name, "started", to] >= epoch + 1
                self.store_y2(call, to)
        for to in sorted(self.receivers(gpu) - {gpu}):
            flags[name, "arrived", to] += 1
        if cta == 0 and (arrivals := CTAS * self.senders(gpu)):
            yield lambda: flags[name, "arrived", gpu] >= (epoch + 1) * arrivals

    def kernel_ends(self, gpu: int, call: int) -> None:
        self.ended[gpu] += 1
        sent = CTAS * sum(gpu in self.receivers(g) for g in self.gpus)
        if self.y2[call, gpu] != sent:
            raise FaultError(f"call {call} ends on GPU {gpu} before its Y2 is there")
        readers = self.gpus if self.reduces else self.down
        if self.replicated and any(self.read[call, g] != CTAS for g in readers):
            raise FaultError(f"call {call} ends on GPU {gpu} before Y1 is read everywhere")

    def run(self, rng: np.random.Generator) -> None:
        """All calls, each time one CTA that can go on."""
        at = [0 for _ in self.gpus]
        running: list[list[tuple[Step, Callable[[], bool]]]] = [[] for _ in self.gpus]
        speed = rng.uniform(0.02, 1.0, len(self.gpus))  # one GPU may be late for long
        while min(at) < len(self.calls):
            for gpu in self.gpus:
                if not running[gpu] and at[gpu] < len(self.calls):
                    ctas = [self.cta(gpu, cta, at[gpu]) for cta in range(CTAS)]
                    running[gpu] = [(cta, lambda: True) for cta in ctas]
            able = [(g, i) for g in self.gpus for i, (_, on) in enumerate(running[g]) if on()]
            if not able:
                raise FaultError("nothing can go on")
            odds = np.array([speed[gpu] for gpu, _ in able])
            gpu, i = able[rng.choice(len(able), p=odds / odds.sum())]
            cta, _ = running[gpu].pop(i)
            if (condition := next(cta, None)) is not None:
                running[gpu].append((cta, condition))
            elif not running[gpu]:
                self.kernel_ends(gpu, at[gpu])
                at[gpu] += 1


DIVISIONS = {
    "mix 1": (2, {0, 1}, {0, 1}),
    "3 GPUs": (3, {0, 1, 2}, {0, 1, 2}),
    "pipeline": (2, {0}, {1}),
    "no part of down": (3, {0, 1, 2}, {0, 2}),
}


@pytest.mark.parametrize(
    ("name", "reduces"),
    [
        *((name, False) for name in DIVISIONS),
        *((name, True) for name in DIVISIONS if name != "pipeline"),
    ],
)
def test_schedules_with_their_own_flags_may_share_y1(name, reduces):
    rng = np.random.default_rng(5)
    for _ in range(40):
        calls = [str(c) for c in rng.choice(["a", "b", "c"], 8)]
        Model(calls, *DIVISIONS[name], reduces=reduces).run(rng)


def test_they_may_not_where_y2_is_not_everywhere():
    """Nobody tells the GPUs of `up` that Y1 was read: the model sees it."""
    model = Model(["a", "b", "c"] * 3, *DIVISIONS["pipeline"], replicated=False)
    with pytest.raises(FaultError, match="writes Y1 of GPU 1 which call"):
        model.run(np.random.default_rng(5))
