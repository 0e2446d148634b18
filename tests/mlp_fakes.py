"""Two GPUs, a driver and arrays that are none: what an Mlp enqueues goes to a log."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

import ctatune
from ctatune import abi, arrays, graphs, mlp, placement, ranks, shared
from ctatune.config import Config
from ctatune.gpus import Box
from ctatune.shared import Shared

K, H, N, MOST = 128, 768, 512, 600
W_UP, W_DOWN = np.zeros((H, K), np.uint16), np.zeros((N, H), np.uint16)
ACTIVE = shared.driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
X, OUT = 1 << 40, 2 << 40  # where callers have theirs
NO_DB = Path("/nonexistent/ctatune.db")
BLOCKS: dict[int, Any] = {}  # parameter blocks by their addresses


class FakeDriver:
    """Logs calls of the driver into `log`; every call succeeds with `answers`, or 0.

    Enums and structs are the real ones. A graph that is launched logs what was captured for it.
    """

    def __init__(self, real: Any, log: list[tuple[Any, ...]], **answers: Any) -> None:
        self._real, self._log, self.answers = real, log, answers
        self._captured: list[tuple[Any, ...]] | None = None
        self.graphs: list[list[tuple[Any, ...]]] = []

    def _of_graphs(self, name: str, args: tuple[Any, ...]) -> Any:
        """What a call that has to do with graphs gives; None for any other one."""
        if name == "cuStreamBeginCapture":
            self._captured = []
        elif name == "cuStreamEndCapture":
            assert self._captured is not None
            self.graphs.append(self._captured)
            self._captured = None
            return len(self.graphs) - 1
        elif name == "cuGraphInstantiate":
            return args[0]
        elif name == "cuGraphLaunch":
            self._log.extend(self.graphs[args[0]])
        elif name in ("cuGraphGetNodes", "cuGraphGetRootNodes"):
            nodes = [100 * args[0] + i for i in range(len(self.graphs[args[0]]))]
            return nodes[: args[1]], args[1]
        elif name == "cuGraphKernelNodeGetParams":
            return SimpleNamespace()
        elif name == "cuGraphExecKernelNodeSetParams":
            graph, node, params = args
            call = self.graphs[graph][node % 100]
            argument = params.kernelParams
            argument = argument if call[2] == "pull" else BLOCKS[argument]
            self.graphs[graph][node % 100] = (*call[:3], argument, call[-1])
        elif self._captured is not None:
            self._captured.append((name, *args))
        else:
            return None
        return 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self._real, name)

        def call(*args: Any) -> tuple[Any, ...]:
            if (found := self._of_graphs(name, args)) is not None:
                values = found if isinstance(found, tuple) else (found,)
                return self._real.CUresult.CUDA_SUCCESS, *values
            self._log.append((name, *args))
            return self._real.CUresult.CUDA_SUCCESS, self.answers.get(name, len(self._log))

        return call


class FakeArena:
    """Gives addresses of one space for all GPUs, and counts what it gave."""

    given = 0
    lock = threading.Lock()
    next_address = 1 << 20
    live: ClassVar[set[FakeArena]] = set()

    def __init__(self, _gpus: Any) -> None:
        FakeArena.live.add(self)
        self._closing: list[Any] = []

    def alloc(self, _gpu: int, nbytes: int) -> int:
        with FakeArena.lock:
            FakeArena.given += 1
            pointer = FakeArena.next_address
            FakeArena.next_address += -(-max(nbytes, 1) // 4096) * 4096
        return pointer

    zeros = alloc

    def upload(self, gpu: int, array: Any) -> int:
        return self.alloc(gpu, array.nbytes)

    def on_close(self, action: Any) -> None:
        self._closing.append(action)

    def close(self) -> None:
        for action in self._closing:
            action()
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

    def copy_box(self, gpu: int, to: int, source: int, box: Box, *, on_host: bool) -> None:
        assert to + box.rows * box.pitch <= FakeArena.next_address
        self.log.append(("copy", source, *box, gpu, on_host))

    def download(self, _gpu: int, _pointer: int, _shape: Any, dtype: Any) -> Any:
        return np.array((self.error, 0, 8, 7), dtype)


class FakeKernel:
    """Says what it would launch."""

    def __init__(self, _gpus: Any, config: Config) -> None:
        self.config, self.ctas, self.build = config, 132, lambda: "build"

    def launch_args(self, argument: Any, stream: int, *, early: bool) -> tuple[Any, ...]:
        BLOCKS[argument.address] = argument.block
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


def fake_machine(monkeypatch: Any) -> Any:
    """Two fake GPUs and the log of what is enqueued on them."""
    log: list[tuple[Any, ...]] = []
    driver = FakeDriver(shared.driver, log, cuStreamIsCapturing=shared._NOT_CAPTURED)
    for module in (shared, graphs):
        monkeypatch.setattr(module, "driver", driver)
    monkeypatch.setattr(shared, "Kernel", FakeKernel)
    monkeypatch.setattr(abi, "_tensor_map", as_map)
    for module in (placement, ranks):
        monkeypatch.setattr(module, "Arena", FakeArena)
    FakeArena.live.clear()
    gpus: Any = FakeGpus(2, log)
    whole = Shared(gpus)
    monkeypatch.setattr(mlp, "shared", lambda _: whole)
    return SimpleNamespace(log=log, driver=driver, gpus=gpus, shared=whole)


def made(**rest: Any) -> ctatune.Mlp:
    return ctatune.Mlp(W_UP, W_DOWN, gpus=2, max_m=MOST, db=NO_DB, **rest)


def x_of(m: int = 64, gpu: int = 0, pointer: int = X, k: int = K) -> OnGpu:
    return OnGpu((m, k), pointer + gpu * (1 << 30), gpu)


def enqueued(log: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Launches, records and waits of a log: what, and on which stream."""
    found = []
    for name, *args in log:
        if name == "cuLaunchKernelEx":
            found.append((args[1], int(args[0].hStream)))
        elif name == "cuEventRecord":
            found.append((f"record {args[0]}", int(args[1])))
        elif name == "cuStreamWaitEvent":
            found.append((f"wait {args[1]}", int(args[0])))
    return found


def call(machine: Any, it: ctatune.Mlp, *args: Any, **named: Any) -> list[tuple[Any, ...]]:
    machine.log.clear()
    it(*args, **named)
    return enqueued(machine.log)


def events(machine: Any, captured: bool = False) -> tuple[Any, ...]:
    lanes = machine.shared._captured if captured else machine.shared._eager
    return lanes.begun, *lanes.ended


def blocks(machine: Any) -> dict[int, Any]:
    """Parameter blocks of the last call, by GPU: in the order of launches the last one is 0."""
    launched = [entry for entry in machine.log if entry[0] == "cuLaunchKernelEx"]
    found = [block for _, _, name, block, _ in launched if name != "pull"]
    return {(gpu + 1) % len(found): block for gpu, block in enumerate(found)}
