"""What a rest of the GPUs before a chain is worth: us a call in each eighth of a chain.

    python benchmarks/pauses.py 4096x8192x8192 1
    python benchmarks/pauses.py 1024x8192x8192 2

For the default config and for `single` (and `tp` on several GPUs): without a pause, after a gate
that was closed while the host enqueued the chain, and after 10 ms of it. Prints the machine first.
"""

import sys
import time
from itertools import pairwise

import numpy as np

from ctatune.config import AnyConfig, Baseline
from ctatune.contestants import Contestants
from ctatune.measure import Bench
from ctatune.problem import Problem
from ctatune.space import default_config
from ctatune.timing import LAUNCHES, QUEUE, Call, Timer

ROUNDS, EIGHTHS = 3, 8
CHAIN_US, MOST_CALLS = 30_000.0, QUEUE // LAUNCHES
CLOSED_S = {"no pause": None, "gate": 0.0, "gate of 10 ms": 0.01}


def eighths(
    bench: Bench, timer: Timer, call: Call, calls: int, closed_s: float | None
) -> list[float]:
    """Times of a call in each eighth of a chain, after load with the same method."""
    gpus, marks, part = bench.gpus, [], calls // EIGHTHS

    def mark() -> None:
        marks.append(gpus.event(0, timed=True))
        gpus.use(0)
        gpus.streams[0].record(marks[-1])

    def chain() -> None:
        mark()
        for _ in range(EIGHTHS):
            timer.enqueue(call, part)
            mark()

    timer.load(call, calls, 0.15)
    if closed_s is None:
        timer.enqueue(call, calls)  # the host is ahead when these end
        chain()
    else:
        with gpus.gated():
            begin = time.monotonic()
            chain()
            time.sleep(max(0.0, begin + closed_s - time.monotonic()))
    gpus.sync()
    return [1e3 * (end - start) / part for start, end in pairwise(marks)]


def main() -> None:
    problem = Problem.of(sys.argv[1], gpus=int(sys.argv[2]))
    methods: list[AnyConfig] = [default_config(problem), Baseline(method="single")]
    if problem.gpus > 1:
        methods.append(Baseline(method="tp"))
    bench = Bench(problem.gpus)
    print(bench.platform())
    for config in methods:
        with bench.gpus.arena() as arena:
            call = Contestants(bench.gpus).prepare(arena, problem, config, 1).call
            timer = Timer(bench.gpus, arena)
            calls = int(min(MOST_CALLS, max(EIGHTHS, CHAIN_US * 8 / timer.chain_us(call, 8))))
            calls -= calls % EIGHTHS
            for name, closed_s in CLOSED_S.items():
                found = [eighths(bench, timer, call, calls, closed_s) for _ in range(ROUNDS)]
                print(config, name, *(f"{us:.1f}" for us in np.median(found, axis=0)))


if __name__ == "__main__":
    main()
