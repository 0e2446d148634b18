"""Where the time of a call goes: stamps of `%globaltimer` inside the kernel, wave by wave.

    python benchmarks/stamps.py 4096x8192x8192 2 '{"mix": 1.0, "pace_us": 8}'

The third argument changes fields of the default config. Prints the machine, the protocol version
and, for each GPU and each round of tiles of its CTAs, mean [min max] in us.
"""

import json
import sys
from dataclasses import replace

import numpy as np

from ctatune.abi import STAMPS
from ctatune.launch import PlacedSchedule
from ctatune.measure import Bench
from ctatune.operands import Inputs, place
from ctatune.problem import Problem
from ctatune.records import SCREENING
from ctatune.schedule import DOWN, NOTHING, build
from ctatune.space import default_config
from ctatune.timing import Timer

CALLS = 20
COLUMNS = {
    "waits for loads": ("math_waits", "math_starts"),
    "main loop": ("math_starts", "math_ends"),
    "epilogue": ("math_ends", "slabs_written"),
    "store": ("store_starts", "stored"),
}


def spread(values: np.ndarray) -> str:
    return f"{values.mean():.1f} [{values.min():.1f} {values.max():.1f}]"


def main() -> None:
    problem = Problem.of(sys.argv[1], gpus=int(sys.argv[2]))
    changes = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    config = replace(default_config(problem), **changes)
    bench = Bench(problem.gpus)
    print(bench.platform(), f"protocol {SCREENING}", config, sep="\n")
    with bench.gpus.arena() as arena:
        schedule = build(problem, config)
        sets = place(Inputs(bench.gpus, arena, problem, 1), schedule, 2)
        placed = PlacedSchedule(bench.gpus, arena, schedule, sets, stamps=True)
        timer = Timer(bench.gpus, arena)
        timer.load(placed.call, CALLS)
        print(f"{timer.chain(placed.call, CALLS).latency_us:.1f} us a call, with stamps")
        placed.check()
        for gpu in range(problem.gpus):
            table(gpu, placed.stamps(gpu) / 1e3, schedule.slots(gpu), placed.ctas)


def table(gpu: int, stamps: np.ndarray, slots: np.ndarray, ctas: int) -> None:
    real = slots[:, 0] != NOTHING
    at = {name: stamps[:, i] for i, name in enumerate(STAMPS)}
    start = at["load_starts"][real].min()
    print(f"GPU {gpu}: last tile stored after {at['stored'][real].max() - start:.1f} us")
    for first in range(0, len(slots), ctas):
        wave = np.flatnonzero(real[first : first + ctas]) + first
        down = (slots[wave, 0] == DOWN).mean()
        parts = [
            f"{name} {spread((at[end] - at[begin])[wave])}"
            for name, (begin, end) in COLUMNS.items()
        ]
        print(f"  round {first // ctas}, {down:.0%} down:", ", ".join(parts))


if __name__ == "__main__":
    main()
