"""Sums of partial Y2 over GPUs, for tensor parallelism: by NCCL, or by our two-shot kernel."""

# The extra is not installed where the code is checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ctatune.abi import ERROR, POLL_TIMEOUT_NS, raise_poll_error
from ctatune.errors import DeviceError
from ctatune.gpus import LINE_BYTES, Arena, Gpus
from ctatune.problem import MAX_GPUS

_BLOCKS, _THREADS = 64, 512  # 340 GB/s of peer traffic need 16 CTAs (DESIGN 4)
_SPELLED = {"ring": "Ring", "tree": "Tree", "ll": "LL", "ll128": "LL128", "simple": "Simple"}


class NcclAllReduce:
    """All-reduce in place by NCCL, one process for all GPUs. Multicast stays off.

    `choice` holds it to an algorithm and a protocol, such as "ring/ll"; "" leaves both to NCCL.
    """

    def __init__(self, gpus: Gpus, choice: str = "") -> None:
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # kept from the first communicator on
        from nccl.bindings import nccl

        self._nccl, self._gpus = nccl, gpus
        try:
            with held_to(choice):
                self._comms = nccl.comm_init_all(len(gpus), list(range(len(gpus))))
        except nccl.NCCLError as error:
            raise DeviceError(
                f"NCCL cannot start ({choice or 'its own choice'}): {error}"
            ) from error

    def enqueue(self, buffers: Sequence[int], elements: int) -> None:
        """Sum `elements` bf16 over GPUs, in place."""
        nccl = self._nccl
        bf16, add = int(nccl.DataType.Bfloat16), int(nccl.RedOp.Sum)
        try:
            nccl.group_start()
            for gpu, buffer in enumerate(buffers):
                stream = int(self._gpus.streams[gpu].handle)
                nccl.all_reduce(buffer, buffer, elements, bf16, add, self._comms[gpu], stream)
            nccl.group_end()
        except nccl.NCCLError as error:
            raise DeviceError(f"NCCL failed: {error}") from error

    def check(self) -> None:
        """NCCL waits for itself."""


@contextmanager
def held_to(choice: str) -> Iterator[None]:
    """Communicators made inside use this algorithm/protocol: NCCL reads both when it makes one."""
    algorithm, _, protocol = choice.partition("/")
    names = {"NCCL_ALGO": algorithm, "NCCL_PROTO": protocol}
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ.update({name: _SPELLED[value] for name, value in names.items() if value})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


_TWO_SHOT = np.dtype(
    [
        ("partial", "u8", MAX_GPUS),
        ("y2", "u8", MAX_GPUS),
        ("flags", "u8", MAX_GPUS),
        ("calls", "u8"),
        ("error", "u8"),
        ("vectors", "i8"),
        ("timeout_ns", "i8"),
        ("gpus", "i4"),
        ("gpu", "i4"),
    ]
)  # struct TwoShot of kernels/support.cu


class TwoShotReduce:
    """Reduce-scatter and all-gather in one kernel over peer memory (kernels/support.cu)."""

    def __init__(
        self, gpus: Gpus, arena: Arena, partials: Sequence[int], y2: Sequence[int], elements: int
    ) -> None:
        everyone = range(len(gpus))
        flags = [arena.zeros(gpu, 2 * MAX_GPUS * LINE_BYTES) for gpu in everyone]
        self._gpus = gpus
        self._errors = [arena.zeros(gpu, ERROR.itemsize) for gpu in everyone]
        self._params = []
        for gpu in everyone:
            block = np.zeros((), _TWO_SHOT)
            block["partial"][: len(gpus)] = partials
            block["y2"][: len(gpus)] = y2
            block["flags"][: len(gpus)] = flags
            block["calls"] = arena.zeros(gpu, 2 * LINE_BYTES)
            block["error"] = self._errors[gpu]
            block["vectors"] = elements // 8
            block["timeout_ns"] = POLL_TIMEOUT_NS
            block["gpus"], block["gpu"] = len(gpus), gpu
            self._params.append(arena.upload(gpu, block))

    def enqueue(self) -> None:
        """Sum the partials into every Y2."""
        for gpu, params in enumerate(self._params):
            self._gpus.support("two_shot", gpu, _BLOCKS, _THREADS, params)

    def check(self) -> None:
        """Raise PipelineTimeoutError if a GPU waited in vain."""
        for gpu, error in enumerate(self._errors):
            raise_poll_error(self._gpus, gpu, error)
