"""What baselines take, by a model: products from rates, an all-reduce from latency and bandwidth.

Micro-batches and `rowsplit` have no model: the first tie with our kernel at best (from 8192 tokens
on, docs/results.md), the second may not answer.
"""

from __future__ import annotations

from dataclasses import replace

from ctatune.config import AnyConfig, Baseline, BaselineMethod
from ctatune.machine_model import MachineModel
from ctatune.problem import BF16_BYTES, Problem

TENSOR_PARALLEL: tuple[BaselineMethod, ...] = ("tp", "tp_twoshot")
_L2_BYTES_A_FLOP = 4.0e9 / (4.0 * 2048 * 8192**2)  # Nsight Compute, see docs/decisions.md
_Sizes = tuple[int, int, int]  # m, outputs, inputs


def modelled(problem: Problem) -> list[Baseline]:
    """The baselines of a problem that have a model, each in its fastest variant."""
    several = TENSOR_PARALLEL if problem.gpus > 1 else ()
    return [Baseline(method="single"), *(Baseline(method=method) for method in several)]


def baseline_us(problem: Problem, baseline: Baseline, machine: MachineModel) -> float:
    """Latency of one of `modelled` by rates alone; `single` is of one GPU, whatever `problem.gpus`
    says. Sustained clocks, cold weights, floor subtracted.
    """
    method = baseline.method
    parts = 1 if method == "single" else problem.gpus
    width = -(-problem.h // parts)
    products = (problem.m, width, problem.k), (problem.m, problem.n, width)
    total_us = _products_us(*products, machine=machine)
    return total_us if method == "single" else total_us + _all_reduce_us(problem, method, machine)


def plain(config: AnyConfig) -> AnyConfig:
    """A baseline without what its variants differ in: the model is of the fastest one."""
    if isinstance(config, Baseline):
        return replace(config, nccl="", graph=False)
    return config


def _products_us(*products: _Sizes, machine: MachineModel) -> float:
    """Products by cuBLAS on one GPU, one after the other."""
    flops = [2.0 * m * outputs * inputs for m, outputs, inputs in products]
    hbm_bytes = [
        BF16_BYTES * (outputs * inputs + m * (outputs + inputs)) for m, outputs, inputs in products
    ]
    hbm_us = [machine.stream_us(size) for size in hbm_bytes]
    compute_us = [count / machine.cublas_tflops * 1e-6 for count in flops]

    def total_us(clock: float) -> float:
        return len(products) * machine.cublas_launch_us + sum(
            machine.together_us(us / clock, memory_us)
            for us, memory_us in zip(compute_us, hbm_us, strict=True)
        )

    energy_pj = machine.flop_pj * sum(flops) + machine.hbm_pj * sum(hbm_bytes)
    energy_pj += machine.l2_pj * _L2_BYTES_A_FLOP * sum(flops)
    return total_us(machine.clock(energy_pj, total_us(1.0)))


def _all_reduce_us(problem: Problem, method: str, machine: MachineModel) -> float:
    """A latency, and each GPU's part of the traffic: twice all but its own share of Y2."""
    sent_bytes = 2.0 * (1.0 - 1.0 / problem.gpus) * problem.m * problem.n * BF16_BYTES
    if method == "tp":
        return machine.nccl_us + sent_bytes / machine.nccl_gbps * 1e-3
    return machine.two_shot_us + sent_bytes / machine.two_shot_gbps * 1e-3
