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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from cuda.bindings import driver

from ctatune import jit
from ctatune.abi import Argument
from ctatune.config import Config
from ctatune.errors import DeviceError, UsageError
from ctatune.gpus import Gpus, check
from ctatune.graphs import Chain
from ctatune.kernel import Kernel
from ctatune.telemetry import gpu_count

_PULL_THREADS = 512
_SUCCESS = driver.CUresult.CUDA_SUCCESS
_THREADS_OWN = 2  # the handle of another stream in each thread
_DEFAULT_STREAMS = (0, 1, _THREADS_OWN)  # handles of streams of the current context
_NOT_CAPTURED = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


_Step = tuple[Callable[..., Any], tuple[Any, ...]]  # a call of the driver, or of a `Chain`


class Copy(NamedTuple):
    """A copy on one GPU, between pointers."""

    to: int
    source: int
    nbytes: int


class Bound(NamedTuple):
    """A call with its pointers: the kernel, what it takes on each GPU, (not for GPU 0) what the
    kernel takes that fetches X from GPU 0, and what GPU 0 copies after it."""

    kernel: Kernel
    arguments: Sequence[Argument]
    pulls: Sequence[Argument]
    copies: Sequence[Copy]


class Listed(NamedTuple):
    """What a call enqueues. `streams` of each GPU keep the order of calls; None in a capture."""

    steps: list[_Step]
    streams: list[int] | None
    in_contexts: bool  # some stream is another one in each context
    bound: Bound  # its memory is read when the steps are taken


class _Lanes:
    """A stream of ours and an event for the end of a call on each GPU, and one for its begin."""

    def __init__(self, gpus: Gpus, streams: Sequence[Any]) -> None:
        self.streams = [int(stream.handle) for stream in streams]
        self._kept = streams
        self.begun, *self.ended = [_event(gpus, gpu) for gpu in (0, *range(len(gpus)))]


class Shared:
    """The GPUs of this process for calls of any `Mlp`.

    Do everything inside `with`: one thread at a time, and the caller's current GPU, on which other
    libraries rely, is what it was after it. A call that is ready needs only the `lock`.
    """

    def __init__(self, gpus: Gpus) -> None:
        self.gpus, self.lock = gpus, threading.RLock()
        self._before: list[Any] = []  # what was current, for each `with` that is open
        self._kernels: dict[tuple[str, int], Kernel] = {}
        self._chains: dict[tuple[Kernel, int], Chain] = {}
        self._pull = gpus.function("pull")
        self._contexts, captured = [], []
        for gpu, device in enumerate(gpus.devices):
            gpus.use(gpu)
            self._contexts.append(check(driver.cuCtxGetCurrent()))
            captured.append(device.create_stream())
        self._eager, self._captured = _Lanes(gpus, gpus.streams), _Lanes(gpus, captured)
        self._last: list[int | None] = [None] * len(gpus)

    def __enter__(self) -> None:
        self.lock.acquire()
        before = driver.cuCtxGetCurrent()[1]
        self._before.append(before)
        if not int(before):  # a thread that has used no GPU yet
            driver.cuCtxSetCurrent(self._contexts[0])

    def __exit__(self, *_: object) -> None:
        driver.cuCtxSetCurrent(self._before.pop())
        self.lock.release()

    def kernel(self, config: Config) -> Kernel:
        """The kernel of a config, loaded once for all configs that differ in order or pace."""
        key = jit.preamble(config), config.ctas
        if key not in self._kernels:
            self._kernels[key] = Kernel(self.gpus, config)
        return self._kernels[key]

    def capturing(self, streams: Sequence[int]) -> bool:
        """Whether the stream of a call is being captured.

        Raises: UsageError when the call has streams on several GPUs: replays of one stream would
        not be ordered with calls on the others.
        """
        for stream in streams:
            if stream and check(driver.cuStreamIsCapturing(stream)) is not _NOT_CAPTURED:
                if len(streams) > 1:
                    raise UsageError("a call with X on each GPU of a process cannot be captured")
                return True
        return False

    def listed(self, bound: Bound, streams: Sequence[int], captured: bool) -> Listed:
        """A call with each GPU's part on its stream, or (one stream: X lies on GPU 0 alone) all of
        it as one piece of work on a stream of GPU 0."""
        several = len(streams) > 1  # never in a capture
        steps = self._each(bound, streams) if several else self._spread(bound, streams[0], captured)
        taken = [*streams, *self._eager.streams[len(streams) :]]
        in_contexts = any(stream in _DEFAULT_STREAMS for stream in streams)
        return Listed(list(steps), None if captured else taken, in_contexts, bound)

    def enqueue(self, call: Listed) -> None:
        """Enqueue a call after the one before."""
        if call.in_contexts or call.streams not in (None, self._last):
            with self:
                if call.streams is not None:
                    self._follow(call.streams)
                _take(call.steps)
        else:
            _take(call.steps)

    def _follow(self, streams: list[int]) -> None:
        """Begin after the call before, where the stream itself does not see to it."""
        for gpu, (last, stream) in enumerate(zip(self._last, streams, strict=True)):
            if last is None or (last == stream != _THREADS_OWN):
                continue
            self.gpus.use(gpu)
            check(driver.cuStreamWaitEvent(stream, self._eager.ended[gpu], 0))
        self._last = streams

    def _spread(self, bound: Bound, stream: int, captured: bool) -> Iterator[_Step]:
        """The stream of GPU 0 waits for the others' kernels to end: a replay may come next, whose
        kernels begin on all GPUs when that stream says so."""
        lanes, others = self._captured if captured else self._eager, range(1, len(self.gpus))
        yield from self._use(0, stream)
        if others:
            yield driver.cuEventRecord, (lanes.begun, _stream(stream))
        for gpu in others:
            here, words = lanes.streams[gpu], bound.pulls[gpu]
            pull = driver.cuLaunchKernelEx, (self._pull_on(here), self._pull, words.address, 0)
            launches = [pull, *self._part(bound, gpu, here, captured)]
            yield driver.cuStreamWaitEvent, (_stream(here), lanes.begun, 0)
            if captured:
                yield from launches
            else:
                yield self._chain(bound, gpu, launches), ((words, bound.arguments[gpu]),)
            yield driver.cuEventRecord, (lanes.ended[gpu], _stream(here))
        yield from self._part(bound, 0, stream, captured)
        for gpu in others:
            yield driver.cuStreamWaitEvent, (_stream(stream), lanes.ended[gpu], 0)
        if not captured:
            yield driver.cuEventRecord, (lanes.ended[0], _stream(stream))

    def _chain(self, bound: Bound, gpu: int, launches: Sequence[_Step]) -> Callable[..., Any]:
        """What a peer runs, as one launch, which costs the host half of two. It takes 125 kB of the
        GPU, so a kernel has one for all calls."""
        key = bound.kernel, gpu
        if key not in self._chains:
            stream = self._eager.streams[gpu]
            self._chains[key] = Chain(self._contexts[gpu], stream, launches)
        return self._chains[key].launch

    def _each(self, bound: Bound, streams: Sequence[int]) -> Iterator[_Step]:
        for gpu, stream in enumerate(streams):
            yield from self._use(gpu, stream)
            yield from self._part(bound, gpu, stream, captured=False)
            yield driver.cuEventRecord, (self._eager.ended[gpu], _stream(stream))

    def _use(self, gpu: int, stream: int) -> Iterator[_Step]:
        """Kernels, events and graphs go where their stream is, whatever is current; the default
        stream is that of the current context."""
        if stream in _DEFAULT_STREAMS:
            yield driver.cuCtxSetCurrent, (self._contexts[gpu],)

    def _part(self, bound: Bound, gpu: int, stream: int, captured: bool) -> Iterator[_Step]:
        """The kernel of one GPU. In a capture it begins after the nodes before it: whether a node
        may begin early beside edges from other GPUs is not known."""
        args = bound.kernel.launch_args(bound.arguments[gpu], stream, early=not captured)
        yield driver.cuLaunchKernelEx, args
        for copy in bound.copies if gpu == 0 else ():
            yield driver.cuMemcpyDtoDAsync, (*copy, _stream(stream))

    def _pull_on(self, stream: int) -> Any:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.gpus.sm_count, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = _PULL_THREADS, 1, 1
        config.hStream = stream
        return config

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


def _take(steps: Sequence[_Step]) -> None:
    for step, args in steps:
        if (status := step(*args)[0]) is not _SUCCESS:
            check((status,))


def _stream(handle: int) -> Any:
    """A stream as the driver takes it at once: a number is converted in each call."""
    return driver.CUstream(handle)


def _event(gpus: Gpus, gpu: int) -> Any:
    gpus.use(gpu)
    return check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))


_made: dict[range, Shared] = {}
_making = threading.Lock()


def shared(gpus: range) -> Shared:
    """The one object for these GPUs, by their ordinals, in this process.

    Raises: DeviceError when there are too few, or no peer access; UsageError when this process
    runs calls on another number of GPUs, above one, already: they would not be in one sequence.
    """
    with _making:
        if gpus in _made:
            return _made[gpus]
        count = len(gpus)
        if others := {len(made) for made in _made if min(len(made), count) > 1}:
            raise UsageError(f"this process uses {others.pop()} GPUs for an Mlp, not {count}")
        if gpus.start < 0:
            raise UsageError(f"gpu must be an ordinal, got {gpus.start}")
        if (present := gpu_count()) < gpus.stop:
            raise DeviceError(f"{gpus.stop} GPUs are asked for, this machine has {present}")
        check(driver.cuInit(0))
        before = check(driver.cuCtxGetCurrent())
        try:
            _made[gpus] = Shared(Gpus(count, first=gpus.start))
        finally:
            check(driver.cuCtxSetCurrent(before))
        return _made[gpus]
