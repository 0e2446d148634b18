"""Ranks that are threads, each with a GPU, a driver and memory that are none."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from mlp_fakes import (
    MOST,
    NO_DB,
    W_DOWN,
    W_UP,
    FakeArena,
    FakeDriver,
    FakeGpus,
    H,
    K,
    N,
    OnGpu,
    X,
    fake_machine,
)

import ctatune
from ctatune import mlp, ranks
from ctatune.config import Config, Tile
from ctatune.shared import Shared

MAPPED = 1 << 44  # from memory of a rank to where another one sees it
WAIT_S = 10
SQUARE = Tile(m=128, n=128)


def rank_of_thread() -> int:
    return int(threading.current_thread().name.removeprefix("rank "))


def seen_by(rank: int, pointer: int) -> int:
    """Where a rank maps memory of another one."""
    return pointer + (rank + 1) * MAPPED


class FakeIpc(FakeDriver):
    """A handle is the pointer that it was made of."""

    def cuMemGetAddressRange(self, pointer: int) -> tuple[Any, ...]:  # noqa: N802
        return self._real.CUresult.CUDA_SUCCESS, pointer - 256, 4096

    def cuIpcGetMemHandle(self, pointer: int) -> tuple[Any, ...]:  # noqa: N802
        handle = self._real.CUipcMemHandle()
        ctypes.c_uint64.from_address(handle.getPtr()).value = pointer
        self._log.append(("export", rank_of_thread(), pointer))
        return self._real.CUresult.CUDA_SUCCESS, handle

    def cuIpcOpenMemHandle(self, handle: Any, _flags: Any) -> tuple[Any, ...]:  # noqa: N802
        pointer = ctypes.c_uint64.from_address(handle.getPtr()).value
        self._log.append(("map", rank_of_thread(), pointer))
        base = seen_by(rank_of_thread(), pointer) - 256
        status = self.answers.get("open", self._real.CUresult.CUDA_SUCCESS)
        return status, base

    def cuIpcCloseMemHandle(self, pointer: int) -> tuple[Any, ...]:  # noqa: N802
        self._log.append(("unmap", rank_of_thread(), pointer))
        return (self._real.CUresult.CUDA_SUCCESS,)


class RankGpus(FakeGpus):
    """The GPU of one rank; what probes write lies in `memory`, which all ranks share."""

    def __init__(self, rank: int, log: list[Any], memory: dict[int, int]) -> None:
        super().__init__(1, log)
        self.rank, self.memory, self.devices[0].uuid = rank, memory, f"GPU-{rank}"

    def fill(self, _gpu: int, pointer: int, _byte: int, _nbytes: int) -> None:
        self.log.append(("zero", self.rank, pointer))

    def support(self, _name: str, _gpu: int, _grid: int, _block: int, to: int, value: Any) -> None:
        self.memory[to % MAPPED] = int(value)

    def download(self, gpu: int, pointer: int, shape: Any, dtype: Any) -> Any:
        if dtype is np.uint32:
            return np.array([self.memory.get(pointer + 4 * i, 0) for i in range(shape[0])])
        return super().download(gpu, pointer, shape, dtype)


class LoggedArena(FakeArena):
    """What is shared: its end is logged."""

    def __init__(self, gpus: Any) -> None:
        super().__init__(gpus)
        self._gpus = gpus

    def close(self) -> None:
        super().close()
        self._gpus.log.append(("free", self._gpus.rank))


class Meeting:
    """An all-gather between threads."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=WAIT_S)
        self.said, self.held = [b""] * world, 0

    def of(self, rank: int) -> Callable[[bytes], Sequence[bytes]]:
        def exchange(message: bytes) -> list[bytes]:
            self.said[rank] = message
            self.held += rank == 0
            self.barrier.wait()
            heard = list(self.said)
            self.barrier.wait()
            return heard

        return exchange


class Machine(SimpleNamespace):
    """Two ranks, the log of all that they enqueue, and the result or error of each."""

    log: list[tuple[Any, ...]]
    meeting: Meeting
    gpus: list[RankGpus]

    def each(self, body: Callable[[int], Any]) -> list[Any]:
        """What `body` gives or raises on each rank."""
        found: list[Any] = [None, None]

        def run(rank: int) -> None:
            try:
                found[rank] = body(rank)
            except Exception as error:  # noqa: BLE001
                found[rank] = error

        threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}") for r in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
        return found

    def made(self, **rest: Any) -> list[Any]:
        """An Mlp of each rank."""
        return self.each(lambda rank: self.one(rank, **rest))

    def one(self, rank: int, *weights: Any, **rest: Any) -> ctatune.Mlp:
        weights = weights or (W_UP, W_DOWN)
        named = {"exchange": self.meeting.of(rank), "max_m": MOST, "db": NO_DB} | rest
        return ctatune.Mlp.for_rank(rank, 2, *weights, **named)

    def call(self, mlps: Sequence[ctatune.Mlp], m: int = 64, out: bool = False) -> list[Any]:
        """A call of each rank, on streams 7 and 8."""

        def one(rank: int) -> Any:
            x = OnGpu((m, K), X + (rank << 30), rank)
            y = (OnGpu((m, N), (X << 1) + (rank << 30), rank),) if out else ()
            return mlps[rank](x, *y, stream=7 + rank)

        return self.each(one)


def fake_ranks(monkeypatch: Any) -> Machine:
    """Two ranks, each with a GPU of the ordinal of its rank."""
    whole = fake_machine(monkeypatch)
    monkeypatch.setattr(ranks, "driver", FakeIpc(ranks.driver, whole.log))
    monkeypatch.setattr(ranks, "Arena", LoggedArena)
    memory: dict[int, int] = {}
    gpus: list[Any] = [RankGpus(rank, whole.log, memory) for rank in range(2)]
    shareds = [Shared(own) for own in gpus]
    monkeypatch.setattr(mlp, "shared", lambda ordinals: shareds[ordinals.start])
    return Machine(
        log=whole.log, driver=whole.driver, meeting=Meeting(2), gpus=gpus, shared=shareds
    )


def times(pair: Machine, name: str) -> list[int]:
    """When something of this name was logged."""
    return [i for i, entry in enumerate(pair.log) if entry[0] == name]


def choice_of(axis: Any) -> Any:
    """An answer for 64 tokens with W_down divided along an axis."""
    answer = ctatune.best(f"64x{K}x{H}x{N}", gpus=2, db=NO_DB)
    config = Config(up=SQUARE, down=SQUARE, stages=4, d_slabs=2, mix=1.0, down_axis=axis)
    return replace(answer, config=config)


def all_raised(errors: list[Any], kind: type[Exception], message: str) -> None:
    """Every rank raised this."""
    for error in errors:
        assert isinstance(error, kind), error
        assert message in str(error)
