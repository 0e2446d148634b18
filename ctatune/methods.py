"""What every baseline is to those who call it, and the libraries that baselines share."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

from ctatune.cublas import Cublas
from ctatune.gpus import Gpus
from ctatune.records import KernelBuild
from ctatune.reduce import NcclAllReduce


class Method(Protocol):
    """What every baseline is: enqueues calls, and says where its Y2 is.

    `sets` is the number of operand sets, `kernel` our kernel where the method runs it.
    """

    y2: dict[int, int]
    sets: int

    @property
    def kernel(self) -> KernelBuild | None: ...

    def call(self, which: int = 0) -> None:
        """Enqueue one call on operand set `which` (modulo the number of sets)."""
        ...

    def check(self) -> None:
        """Raise PipelineTimeoutError if a finished call waited in vain."""
        ...


class Libraries:
    """cuBLAS and NCCL of one process, started when they are first needed."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._nccl: dict[str, NcclAllReduce] = {}

    @cached_property
    def blas(self) -> Cublas:
        return Cublas(self._gpus)

    def nccl(self, choice: str) -> NcclAllReduce:
        """The communicators that are held to a choice of algorithm and protocol."""
        if choice not in self._nccl:
            self._nccl[choice] = NcclAllReduce(self._gpus, choice)
        return self._nccl[choice]
