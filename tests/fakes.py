"""A bench without GPUs, for tests of worker and search. Not a simulator: it has no physics."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from ctatune.config import OWN_KERNEL, AnyConfig, Config
from ctatune.errors import DeviceError
from ctatune.fit import prior_model
from ctatune.jit import kernel_hash
from ctatune.machine_model import DEFAULT_PLATFORM, MachineModel, document, load
from ctatune.problem import Problem
from ctatune.records import KernelBuild, Measurement, Platform, Verification


def design_machine() -> MachineModel:
    """The machine as single experiments described it, before any fit."""
    return prior_model(document(DEFAULT_PLATFORM))


def cool_machine() -> MachineModel:
    """The same, but of a GPU that needs no power and keeps its clock."""
    return replace(design_machine(), flop_pj=1e-9, l2_pj=1e-9, hbm_pj=1e-9)


class FakeBench:
    """Answers at once: the wider the tile, the faster. Some configs misbehave on demand."""

    def __init__(self, bad: str = "", start: str = "") -> None:
        if start:
            raise DeviceError(start)
        self.bad = bad

    def platform(self) -> Platform:
        return load().platform

    def trial(self, problem: Problem, config: AnyConfig, seed: int) -> Measurement:
        if not isinstance(config, Config) and self.bad == "no wheel":
            return Measurement(outcome="invalid", detail="nccl4py is not installed")
        if isinstance(config, Config) and config.up.n == 128:
            if self.bad == "hang":
                time.sleep(60)
            if self.bad == "die":
                os._exit(7)
            if self.bad == "break":
                raise DeviceError("the CUDA driver answered CUDA_ERROR_LAUNCH_FAILED")
            if self.bad == "wrong":
                return Measurement(outcome="wrong", detail="3 NaNs")
            if self.bad == "too fast":
                return self._ok(config, 0.001, seed)
        return self._ok(config, self._latency_us(problem, config), seed)

    def finals(self, problem, configs, seed: int) -> list[Measurement]:
        if self.bad == "lost final":
            os._exit(7)
        return [
            replace(self._ok(c, self._latency_us(problem, c), seed), phase="final") for c in configs
        ]

    def _latency_us(self, problem: Problem, config: AnyConfig) -> float:
        base_us = problem.flops / 500e6
        if not isinstance(config, Config):
            return base_us
        return base_us / problem.gpus * (1.5 - config.up.n / 512 + config.down.group_m / 100)

    def _ok(self, config: AnyConfig, latency_us: float, seed: int) -> Measurement:
        proof = Verification(
            passed=True,
            seed=seed,
            relative_error=1e-3,
            worst_error=0.01,
            nans=0,
            bitwise_equal=True if isinstance(config, Config) else None,
        )
        kernel = KernelBuild(
            hash=kernel_hash(), compiler="fake", registers=168, local_bytes=0, smem_bytes=1
        )
        return Measurement(
            outcome="ok",
            latency_us=latency_us,
            interval_us=(latency_us * 0.99, latency_us * 1.01),
            samples_us=(latency_us,) * 5,
            floor_us=6.0,
            verification=proof,
            kernel=kernel if config.method in OWN_KERNEL else None,
        )
