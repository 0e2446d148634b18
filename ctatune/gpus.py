"""The GPUs of one process: contexts, streams, memory, peer access and the host gate.

Launching goes through `cuda.core`; memory, peer access, tensor maps and stream waits through the
driver bindings of cuda-python.
"""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver
from cuda.core import Device, EventOptions, LaunchConfig, ObjectCode, launch
from numpy.typing import NDArray

from ctatune import jit
from ctatune.errors import DeviceError

LINE_BYTES = 128  # every flag stands on a cache line of its own
PROBE_BYTES = 4
_PROBE_PATTERN = 0x5A17C0DE
SUPPORT = (
    "fill_normal",
    "reference_gemm",
    "compare",
    "barrier",
    "two_shot",
    "pull",
    "nothing",
    "delay",
    "probe_write",
)


def check(result: tuple[Any, ...]) -> Any:
    """Unwrap what a driver binding returned: (status,), (status, value) or (status, *values).

    Raises: DeviceError with the driver's name for the status.
    """
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the CUDA driver answered {status.name}")
    return values[0] if len(values) == 1 else values or None


class Box(NamedTuple):
    """Rows, the bytes of each, and the bytes from one to the next where they are and will be."""

    rows: int
    row_bytes: int
    source_pitch: int
    pitch: int


class Arena:
    """Device memory that is freed together. Pointers are plain ints, valid on every GPU."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._held: list[tuple[int, int]] = []
        self._closing: list[Callable[[], None]] = []

    def alloc(self, gpu: int, nbytes: int) -> int:
        """`nbytes` of uninitialised memory on `gpu` (at least 256-byte aligned)."""
        self._gpus.use(gpu)
        pointer = int(check(driver.cuMemAlloc(max(nbytes, LINE_BYTES))))
        self._held.append((gpu, pointer))
        return pointer

    def zeros(self, gpu: int, nbytes: int) -> int:
        """`nbytes` of zeros on `gpu`, which peers may add to from now on."""
        pointer = self.alloc(gpu, nbytes)
        self._gpus.fill(gpu, pointer, 0, nbytes)
        self._gpus.wait(gpu)
        return pointer

    def upload(self, gpu: int, array: NDArray[Any]) -> int:
        """A copy of `array` on `gpu`, complete on return.

        The stream says when it is: a synchronous copy from pageable memory may return before its
        last bytes have arrived (driver API, "API synchronization behavior").
        """
        array = np.ascontiguousarray(array)
        pointer = self.alloc(gpu, array.nbytes)
        if array.nbytes:
            stream = self._gpus.streams[gpu].handle
            check(driver.cuMemcpyHtoDAsync(pointer, array.ctypes.data, array.nbytes, stream))
            self._gpus.wait(gpu)
        return pointer

    def on_close(self, action: Callable[[], None]) -> None:
        """Run `action` before anything is freed."""
        self._closing.append(action)

    def close(self) -> None:
        """Free everything. Call only when no kernel that uses it is in flight."""
        while self._closing:
            self._closing.pop()()
        for gpu, pointer in self._held:
            self._gpus.use(gpu)
            check(driver.cuMemFree(pointer))
        self._held.clear()


class Gpus:
    """`count` GPUs with peer access proved by real writes, and one stream on each.

    They are those with the ordinals from `first` on; no other one is touched. With `ranks` above 1,
    so many of them share a GPU, each with its part of the SMs: to test what more GPUs would do.
    Latencies mean nothing then.

    Raises: DeviceError when there are too few, one is no sm_90, peers cannot reach each other, or
    the environment serialises launches.
    """

    def __init__(self, count: int, *, first: int = 0, ranks: int = 1) -> None:
        _refuse_serialised_launches()
        check(driver.cuInit(0))
        present = int(check(driver.cuDeviceGetCount()))
        self.ranks, needed = ranks, -(-count // ranks)
        if present < first + needed:
            raise DeviceError(f"{first + needed} GPUs are asked for, this machine has {present}")
        self.devices = [Device(first + i % needed) for i in range(count)]
        self.streams = []
        for device in self.devices:
            device.set_current()
            if tuple(device.compute_capability) != (9, 0):
                raise DeviceError(f"the kernels are for sm_90a, {device.name} is sm_{device.arch}")
            self.streams.append(device.create_stream())
        self._connect_peers()
        self._support: dict[str, Any] = dict(
            zip(SUPPORT, self.load(jit.cubin("support"), SUPPORT), strict=True)
        )
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        self._gate_address = int(check(driver.cuMemHostAlloc(PROBE_BYTES, flags)))
        self._gate = ctypes.c_uint32.from_address(self._gate_address)
        self._gate.value = 0
        self.probe_peers()

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def sm_count(self) -> int:
        """SMs of one rank."""
        return int(self.devices[0].properties.multiprocessor_count) // self.ranks

    @property
    def l2_bytes(self) -> int:
        return int(self.devices[0].properties.l2_cache_size)

    def use(self, gpu: int) -> None:
        """Make `gpu` current in this thread."""
        self.devices[gpu].set_current()

    def sync(self) -> None:
        """Wait for every stream. Raises: DeviceError when a context is broken."""
        for gpu in range(len(self)):
            self.wait(gpu)

    def wait(self, gpu: int) -> None:
        """Wait for the stream of `gpu`. Raises: DeviceError when its context is broken."""
        self.use(gpu)
        check(driver.cuStreamSynchronize(self.streams[gpu].handle))

    def fill(self, gpu: int, pointer: int, byte: int, nbytes: int) -> None:
        """Enqueue writing `byte` to `nbytes` of memory, on the stream of `gpu`.

        A memset without a stream returns before it is done, and our streams do not wait for the
        default one: kernels ran into poison that was still being written (536 MB of Y1).
        """
        self.use(gpu)
        check(driver.cuMemsetD8Async(pointer, byte, nbytes, self.streams[gpu].handle))

    def load(self, cubin: bytes, kernels: Sequence[str], *, smem_bytes: int = 0) -> list[Any]:
        """The named kernels of a cubin, allowed `smem_bytes` of dynamic shared memory."""
        self.use(0)
        code = ObjectCode.from_cubin(cubin)
        loaded = [code.get_kernel(name) for name in kernels]
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for device in self.devices if smem_bytes else ():
            for kernel in loaded:
                check(
                    driver.cuKernelSetAttribute(limit, smem_bytes, kernel.handle, device.device_id)
                )
        return loaded

    def support(self, name: str, gpu: int, grid: Any, block: int, *args: Any) -> None:
        """Launch a kernel of `kernels/support.cu` on the stream of `gpu`."""
        self.use(gpu)
        config = LaunchConfig(grid=grid, block=block)
        launch(self.streams[gpu], config, self._support[name], *args)

    def launcher(self, name: str, gpu: int, *args: Any) -> Callable[[], None]:
        """A launch of one warp of `support` whose arguments, ctypes values, never change: it takes
        the host a third of the time."""
        function, stream = self.function(name), self.streams[gpu].handle
        array = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        where = ctypes.addressof(array) if args else 0

        def enqueue(_kept: Any = (args, array)) -> None:
            self.use(gpu)
            check(driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, where, 0))

        return enqueue

    def function(self, name: str) -> Any:
        """A kernel of `kernels/support.cu` as the driver takes it."""
        return driver.CUfunction(int(self._support[name].handle))

    def event(self, gpu: int, *, timed: bool = False) -> Any:
        """A new event on `gpu`."""
        self.use(gpu)
        return self.devices[gpu].create_event(EventOptions(timing_enabled=timed))

    def copy(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        """Enqueue a copy between any two GPUs by a copy engine."""
        check(driver.cuMemcpyAsync(to, source, nbytes, stream.handle))

    def copy_box(self, gpu: int, to: int, source: int, box: Box, *, on_host: bool) -> None:
        """Enqueue a copy of a box on the host or on any GPU to memory of `gpu`."""
        what = driver.CUDA_MEMCPY2D()
        types = driver.CUmemorytype
        if on_host:
            what.srcMemoryType, what.srcHost = types.CU_MEMORYTYPE_HOST, source
        else:
            what.srcMemoryType, what.srcDevice = types.CU_MEMORYTYPE_UNIFIED, source
        what.dstMemoryType, what.dstDevice = types.CU_MEMORYTYPE_DEVICE, to
        what.Height, what.WidthInBytes, what.srcPitch, what.dstPitch = box
        self.use(gpu)
        check(driver.cuMemcpy2DAsync(what, self.streams[gpu].handle))

    @contextmanager
    def arena(self) -> Iterator[Arena]:
        """Memory for the length of a `with` block."""
        arena = Arena(self)
        try:
            yield arena
        finally:
            arena.close()

    @contextmanager
    def gated(self) -> Iterator[None]:
        """Hold every stream until the block has enqueued its work, then release all at once.

        Inside, nothing may wait for a stream: no zeroed memory, no uploads, no downloads.
        """
        turn = self._gate.value + 1
        at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        for stream in self.streams:
            check(driver.cuStreamWaitValue32(stream.handle, self._gate_address, turn, at_least))
        try:
            yield
        finally:
            self._gate.value = turn

    def _connect_peers(self) -> None:
        contexts = [device.context.handle for device in self.devices]
        for here, device in enumerate(self.devices):
            for there, peer in enumerate(self.devices):
                if device.device_id == peer.device_id:
                    continue
                if not device.can_access_peer(peer):
                    raise DeviceError(f"GPU {here} has no peer access to GPU {there}")
                self.use(here)
                (status,) = driver.cuCtxEnablePeerAccess(contexts[there], 0)
                if status != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
                    check((status,))

    def probe_peers(self) -> None:
        """Write to every peer and read it back: reported access is not proof (IOMMU, ACS)."""
        with self.arena() as arena:
            words = [arena.zeros(gpu, PROBE_BYTES * len(self)) for gpu in range(len(self))]
            for here in range(len(self)):
                for there in range(len(self)):
                    word = words[there] + PROBE_BYTES * here
                    self.support("probe_write", here, 1, 1, word, np.uint32(_PROBE_PATTERN + here))
            self.sync()
            for there, pointer in enumerate(words):
                seen = self.download(there, pointer, (len(self),), np.uint32)
                for here, value in enumerate(seen):
                    if value != _PROBE_PATTERN + here:
                        raise DeviceError(f"what GPU {here} writes to GPU {there} does not arrive")

    def download(self, gpu: int, pointer: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A host copy of device memory, after what is enqueued on the stream of `gpu`."""
        self.wait(gpu)
        array = np.empty(shape, dtype=dtype)
        check(driver.cuMemcpyDtoH(array.ctypes.data, pointer, array.nbytes))
        return array


def _refuse_serialised_launches() -> None:
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise DeviceError(
            "CUDA_LAUNCH_BLOCKING is set: it serialises launches, and kernels that wait for each "
            "other would hang"
        )
