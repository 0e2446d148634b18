"""Tensor parallelism by torch (cuBLAS and NCCL) against our `tp`, on the same streams in one run.

    python benchmarks/torch_tp.py 16x8192x8192 1024x8192x8192

Needs torch with CUDA and two GPUs. Prints the machine, the protocol version, and for each shape
the median and its 95 % interval of five rounds, microseconds.
"""

import os
import sys

os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch

from ctatune.config import Baseline
from ctatune.measure import SCREEN_ROUNDS, Bench
from ctatune.problem import Problem
from ctatune.records import SCREENING
from ctatune.stats import median_interval
from ctatune.timing import Timer

SETS = 3  # of operands in turn; weights of 8192x8192 layers leave L2 between two calls


def torch_tp(bench: Bench, problem: Problem) -> tuple[float, float, float]:
    gpus, everyone = bench.gpus, range(problem.gpus)
    part = problem.h // problem.gpus

    def normal(rows: int, columns: int) -> list[list[torch.Tensor]]:
        kind = {"dtype": torch.bfloat16}
        scale = columns**-0.5
        return [
            [torch.randn(rows, columns, device=f"cuda:{g}", **kind) * scale for g in everyone]
            for _ in range(SETS)
        ]

    x, up, down = normal(problem.m, problem.k), normal(part, problem.k), normal(problem.n, part)
    y1 = [torch.empty(problem.m, part, device=t.device, dtype=t.dtype) for t in x[0]]
    y2 = [torch.empty(problem.m, problem.n, device=t.device, dtype=t.dtype) for t in x[0]]
    handles = [int(stream.handle) for stream in gpus.streams]
    streams = [torch.cuda.ExternalStream(handles[g], device=f"cuda:{g}") for g in everyone]

    def call(which: int = 0) -> None:
        for g in everyone:
            with torch.cuda.device(g), torch.cuda.stream(streams[g]):
                torch.mm(x[which % SETS][g], up[which % SETS][g].t(), out=y1[g])
                torch.mm(y1[g], down[which % SETS][g].t(), out=y2[g])
        torch.cuda.nccl.all_reduce(y2, outputs=y2, streams=streams)

    call()  # torch starts NCCL in its first call, which must not wait behind a gate
    gpus.sync()
    with gpus.arena() as arena:
        timer = Timer(gpus, arena)
        calls = timer.calls_for(call)
        timer.load(call, calls)
        rounds = [timer.chain(call, calls).latency_us for _ in range(SCREEN_ROUNDS)]
    return median_interval(rounds)


def main() -> None:
    bench = Bench(2)
    print(bench.platform(), f"protocol {SCREENING}", f"torch {torch.__version__}", sep="\n")
    for text in sys.argv[1:]:
        problem = Problem.of(text, gpus=2)
        measured = bench.trial(problem, Baseline(method="tp"), 1)
        print(problem.shape, "tp", measured.latency_us, measured.interval_us)
        print(problem.shape, "torch", torch_tp(bench, problem))


if __name__ == "__main__":
    main()
