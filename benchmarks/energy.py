"""Joules and microseconds a call of our families and of cuBLAS on one GPU that is always busy.

    python benchmarks/energy.py 64x8192x4096x8192 4096x8192x8192

Under the power limit the joules of a call are its latency. Prints the machine, the protocol
version, and for each family (at group 8, where it is valid) mJ, us and W.
"""

import sys
import time

from ctatune.config import AnyConfig, Baseline
from ctatune.contestants import Contestants
from ctatune.limits import why_invalid
from ctatune.measure import Bench
from ctatune.problem import Problem
from ctatune.records import SCREENING
from ctatune.space import FAMILIES
from ctatune.telemetry import Telemetry
from ctatune.timing import Timer

SECONDS = 0.6


def contestants(problem: Problem) -> list[AnyConfig]:
    group = 8 if problem.m > 1024 else 2
    ours = [f.config(up_group=group, down_group=group, stage_split=(1, 0)) for f in FAMILIES]
    fits = [c for c in ours if c.up.m <= 2 * problem.m and why_invalid(c, problem) is None]
    return [Baseline(method="single"), *fits]


def main() -> None:
    bench = Bench(1)
    telemetry: Telemetry = bench._telemetry  # it holds the lock of the GPU
    print(bench.platform(), f"protocol {SCREENING}", sep="\n")
    for shape in sys.argv[1:]:
        problem = Problem.of(shape)
        for config in contestants(problem):
            with bench.gpus.arena() as arena:
                method = Contestants(bench.gpus).prepare(arena, problem, config, 1)
                timer = Timer(bench.gpus, arena)
                calls = timer.calls_for(method.call)
                timer.load(method.call, calls, SECONDS / 2)
                before, begin = telemetry.energies_j(), time.monotonic()
                loaded = timer.load(method.call, calls, SECONDS)
                seconds = time.monotonic() - begin
                after = telemetry.energies_j()
                if not before or not after:
                    sys.exit("NVML counts no energy on this GPU")
                joules = sum(after) - sum(before)
                print(
                    f"{shape} {1e3 * joules / loaded.calls:8.2f} mJ "
                    f"{1e6 * seconds / loaded.calls:8.1f} us {joules / seconds:4.0f} W "
                    f"duty {loaded.duty:.2f} {config}"
                )


if __name__ == "__main__":
    main()
