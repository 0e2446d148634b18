"""What all `Mlp`s of a process share: the GPUs, the compiled kernels, and the order of calls.

The kernels of a call wait for each other over GPUs and fill every SM, so two calls must never
overlap on one GPU while they are in another order on a second one: each would wait for the other.
Calls of a process therefore form one sequence. A lock keeps enqueueing threads apart, and a call
on another stream than the one before it waits for an event of that one, on each GPU.

While a stream is captured into a graph, other streams and events of ours take part than in calls
that are not captured: a stream that joins a capture stays in it until it ends, and an event that
was recorded in a capture means nothing outside. The host sees no replay: the caller orders replays
and other calls, by enqueueing them on the same stream for example.
"""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from cuda.bindings import driver

from ctatune import jit
from ctatune.abi import Argument
from ctatune.config import Config
from ctatune.errors import DeviceError, UsageError
from ctatune.gpus import Gpus, check
from ctatune.kernel import Kernel
from ctatune.telemetry import gpu_count

_PULL_THREADS = 512
_ACTIVE = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE


class Bound(NamedTuple):
    """A call with its pointers: the kernel, what it takes on each GPU, and (not for GPU 0) what
    the kernel takes that fetches X from GPU 0."""

    kernel: Kernel
    arguments: Sequence[Argument]
    pulls: Sequence[Argument]


class _Lanes:
    """A stream of ours and an event for the end of a call on each GPU, and one for its begin."""

    def __init__(self, gpus: Gpus, streams: Sequence[Any]) -> None:
        self.streams = [int(stream.handle) for stream in streams]
        self._kept = streams
        self.begun, *self.ended = [_event(gpus, gpu) for gpu in (0, *range(len(gpus)))]


class Shared:
    """The GPUs of this process for calls of any `Mlp`. Hold `lock` while you enqueue."""

    def __init__(self, gpus: Gpus) -> None:
        self.gpus, self.lock = gpus, threading.RLock()
        self._kernels: dict[tuple[str, int], Kernel] = {}
        self._pull = gpus.function("pull")
        self._pulls: dict[tuple[int, int], Any] = {}
        captured = []
        for gpu, device in enumerate(gpus.devices):
            gpus.use(gpu)
            captured.append(device.create_stream())
        self._eager, self._captured = _Lanes(gpus, gpus.streams), _Lanes(gpus, captured)
        self._last: list[int | None] = [None] * len(gpus)

    def kernel(self, config: Config) -> Kernel:
        """The kernel of a config, loaded once for all configs that differ in order or pace."""
        key = jit.preamble(config), config.ctas
        if key not in self._kernels:
            self._kernels[key] = Kernel(self.gpus, config)
        return self._kernels[key]

    def capturing(self, streams: Sequence[int]) -> bool:
        """Whether these streams are being captured.

        Raises: UsageError when only some are.
        """
        found = {bool(s) and check(driver.cuStreamIsCapturing(s)) == _ACTIVE for s in streams}
        if len(found) > 1:
            raise UsageError("the streams of all GPUs must take part in a capture, or none")
        return found.pop()

    def spread(self, bound: Bound, stream: int, captured: bool) -> None:
        """Enqueue a call as one piece of work on a stream of GPU 0, where X lies."""
        lanes, others = self._captured if captured else self._eager, range(1, len(self.gpus))
        self.gpus.use(0)
        self._follow(0, stream, captured)
        if others:
            check(driver.cuEventRecord(lanes.begun, stream))
        for gpu in others:
            here = lanes.streams[gpu]
            self.gpus.use(gpu)
            self._follow(gpu, here, captured)
            check(driver.cuStreamWaitEvent(here, lanes.begun, 0))
            config = self._pull_config(gpu, here)
            check(driver.cuLaunchKernelEx(config, self._pull, bound.pulls[gpu].address, 0))
            bound.kernel.launch(gpu, bound.arguments[gpu], here, early=not captured)
            check(driver.cuEventRecord(lanes.ended[gpu], here))
        bound.kernel.launch(0, bound.arguments[0], stream, early=not captured)
        for gpu in others:
            check(driver.cuStreamWaitEvent(stream, lanes.ended[gpu], 0))
        if not captured:
            check(driver.cuEventRecord(lanes.ended[0], stream))

    def each(self, bound: Bound, streams: Sequence[int], captured: bool) -> None:
        """Enqueue each GPU's part of a call on a stream of that GPU."""
        for gpu, stream in enumerate(streams):
            self.gpus.use(gpu)
            self._follow(gpu, stream, captured)
            bound.kernel.launch(gpu, bound.arguments[gpu], stream, early=not captured)
            if not captured:
                check(driver.cuEventRecord(self._eager.ended[gpu], stream))

    def _follow(self, gpu: int, stream: int, captured: bool) -> None:
        """Begin after the call before, where the stream itself does not see to it."""
        if captured:
            return
        if self._last[gpu] not in (None, stream):
            check(driver.cuStreamWaitEvent(stream, self._eager.ended[gpu], 0))
        self._last[gpu] = stream

    def _pull_config(self, gpu: int, stream: int) -> Any:
        if (gpu, stream) not in self._pulls:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = self.gpus.sm_count, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = _PULL_THREADS, 1, 1
            config.hStream = stream
            self._pulls[gpu, stream] = config
        return self._pulls[gpu, stream]

    def wait(self) -> None:
        """Wait for the last call that was not captured, and for what we enqueued ourselves."""
        self.gpus.sync()
        for gpu, last in enumerate(self._last):
            if last is not None:
                self.gpus.use(gpu)
                check(driver.cuEventSynchronize(self._eager.ended[gpu]))

    def drain(self) -> None:
        """Wait for everything on every GPU, replays included: memory may be freed after it."""
        for gpu in range(len(self.gpus)):
            self.gpus.use(gpu)
            check(driver.cuCtxSynchronize())


def _event(gpus: Gpus, gpu: int) -> Any:
    gpus.use(gpu)
    return check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))


@contextmanager
def kept_context() -> Iterator[None]:
    """Leave the caller's current GPU as it was: other libraries rely on it."""
    before = check(driver.cuCtxGetCurrent())
    try:
        yield
    finally:
        check(driver.cuCtxSetCurrent(before))


_made: dict[int, Shared] = {}
_making = threading.Lock()


def shared(count: int) -> Shared:
    """The one object for `count` GPUs in this process.

    Raises: DeviceError when there are too few, or no peer access; UsageError when this process
    runs calls on another number of GPUs, above one, already: they would not be in one sequence.
    """
    with _making:
        if count in _made:
            return _made[count]
        if others := {made for made in _made if min(made, count) > 1}:
            raise UsageError(f"this process uses {others.pop()} GPUs for an Mlp, not {count}")
        if (present := gpu_count()) < count:
            raise DeviceError(f"{count} GPUs are asked for, this machine has {present}")
        check(driver.cuInit(0))
        with kept_context():
            _made[count] = Shared(Gpus(count))
        return _made[count]
