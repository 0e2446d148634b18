"""Calls every family of the kernel on small shapes, for compute-sanitizer.

compute-sanitizer --tool memcheck python benchmarks/smoke.py [GPUS]
"""

import sys
from dataclasses import replace

from ctatune.gpus import Gpus
from ctatune.launch import PlacedSchedule
from ctatune.limits import default_split, why_invalid
from ctatune.operands import Inputs, place
from ctatune.problem import Problem
from ctatune.schedule import build
from ctatune.space import FAMILIES, swapped

SHAPES = ((200, 328, 1000, 712), (64, 512, 520, 768), (1, 128, 512, 256))
CALLS = 3


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    gpus = Gpus(count)
    kernels = [family.config(up_group=2, down_group=2) for family in FAMILIES]
    for m, k, h, n in SHAPES:
        problem = Problem(m=m, k=k, h=h, n=n, gpus=count)
        for kernel in [*kernels, *swapped(problem)]:
            config = replace(kernel, stage_split=default_split(count))
            if reason := why_invalid(config, problem):
                print(f"skipped {problem.shape} {config}: {reason}")
                continue
            with gpus.arena() as arena:
                schedule = build(problem, config)
                sets = place(Inputs(gpus, arena, problem, 3), schedule, 2)
                placed = PlacedSchedule(gpus, arena, schedule, sets)
                for which in range(CALLS):
                    placed.call(which)
                gpus.sync()
                placed.check()
            print(f"ran {problem.shape} {config}")


if __name__ == "__main__":
    main()
