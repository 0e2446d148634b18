"""A bench and a driver without GPUs, for tests. Not a simulator: they have no physics."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from ctatune import arrays
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


class FakeDriver:
    """Logs calls of the driver into `log`; every call succeeds with `answers`, or 0.

    Enums and structs are the real ones.
    """

    def __init__(self, real: Any, log: list[tuple[Any, ...]], **answers: Any) -> None:
        self._real, self._log, self.answers = real, log, answers

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self._real, name)

        def call(*args: Any) -> tuple[Any, ...]:
            self._log.append((name, *args))
            return self._real.CUresult.CUDA_SUCCESS, self.answers.get(name, len(self._log))

        return call


class FakeArena:
    """Gives addresses of one space for all GPUs, and counts what it gave."""

    given = 0
    next_address = 1 << 20
    live: ClassVar[set[FakeArena]] = set()

    def __init__(self, _gpus: Any) -> None:
        FakeArena.live.add(self)

    def alloc(self, _gpu: int, nbytes: int) -> int:
        FakeArena.given += 1
        pointer = FakeArena.next_address
        FakeArena.next_address += -(-max(nbytes, 1) // 4096) * 4096
        return pointer

    zeros = alloc

    def upload(self, gpu: int, array: Any) -> int:
        return self.alloc(gpu, array.nbytes)

    def close(self) -> None:
        FakeArena.live.discard(self)


class FakeGpus:
    """GPUs whose streams are numbered 100, 101, ...; what is enqueued goes to `log`."""

    sm_count = 132

    def __init__(self, count: int, log: list[tuple[Any, ...]]) -> None:
        self.log, self.error = log, 0
        made = iter(range(200, 300))

        def device() -> Any:
            return SimpleNamespace(create_stream=lambda: SimpleNamespace(handle=next(made)))

        self.devices = [device() for _ in range(count)]
        self.streams = [SimpleNamespace(handle=100 + gpu) for gpu in range(count)]

    def __len__(self) -> int:
        return len(self.devices)

    def use(self, gpu: int) -> None: ...

    def sync(self) -> None: ...

    def wait(self, gpu: int) -> None: ...

    def function(self, name: str) -> str:
        return name

    def copy(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        self.log.append(("copy", to, source, nbytes, stream.handle))

    def download(self, _gpu: int, _pointer: int, _shape: Any, dtype: Any) -> Any:
        return np.array((self.error, 0, 8, 7), dtype)


class FakeKernel:
    """Says what it would launch."""

    def __init__(self, _gpus: Any, config: Config) -> None:
        self.config, self.ctas, self.build = config, 132, lambda: "build"

    def launch_args(self, argument: Any, stream: int, *, early: bool) -> tuple[Any, ...]:
        return SimpleNamespace(hStream=stream), "mlp early" if early else "mlp", argument.block, 0


def as_map(*what: Any) -> np.void:
    """A tensor map that says what it was made of."""
    return np.void(repr(what).encode().ljust(128))


class OnGpu:
    """An array of another library on a GPU: bf16 through DLPack."""

    def __init__(self, shape: tuple[int, ...], pointer: int, gpu: int = 0, **rest: Any) -> None:
        self.made, self.gpu, self.rest = (pointer, shape, gpu, None), gpu, rest

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.gpu

    def __dlpack__(self, **_: Any) -> Any:
        return arrays._capsule(*self.made, **self.rest)
