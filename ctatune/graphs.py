"""CUDA graphs of calls: what frameworks do against the gaps between small kernels."""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver

from ctatune.abi import Argument
from ctatune.errors import DeviceError
from ctatune.gpus import Arena, Gpus, check
from ctatune.methods import Method

# Libraries may ask the driver for anything while they are captured, such as to load a kernel.
_RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


class Graphed:
    """A method whose calls are replayed: one graph for each GPU and operand set.

    The method must enqueue all its work on the streams of the GPUs that hold its Y2.

    Raises: DeviceError, which names the method, when a library refuses to be captured.
    """

    def __init__(self, gpus: Gpus, arena: Arena, method: Method, name: str) -> None:
        self._gpus, self._method = gpus, method
        self.y2, self.sets, self.kernel = method.y2, method.sets, method.kernel
        method.call(0)  # what a library sets up in its first call must not be captured
        gpus.sync()
        self._graphs: list[dict[int, Any]] = []
        arena.on_close(self._destroy)
        try:
            for which in range(self.sets):
                self._graphs.append(self._instantiated(self._captured(which)))
        except DeviceError as error:
            raise DeviceError(f"{name} cannot be captured: {error}") from error
        gpus.sync()

    def _captured(self, which: int) -> dict[int, Any]:
        """The graph of each GPU's part of a call; all streams capture at once."""
        ended: dict[int, Any] = {}
        begun: list[int] = []
        try:
            for gpu in self.y2:
                self._gpus.use(gpu)
                check(driver.cuStreamBeginCapture(self._gpus.streams[gpu].handle, _RELAXED))
                begun.append(gpu)
            self._method.call(which)
        finally:
            for gpu in begun:
                self._gpus.use(gpu)
                ended[gpu] = driver.cuStreamEndCapture(self._gpus.streams[gpu].handle)
        return {gpu: check(result) for gpu, result in ended.items()}

    def _instantiated(self, graphs: dict[int, Any]) -> dict[int, Any]:
        ready = {}
        for gpu, graph in graphs.items():
            self._gpus.use(gpu)
            ready[gpu] = check(driver.cuGraphInstantiate(graph, 0))
            check(driver.cuGraphUpload(ready[gpu], self._gpus.streams[gpu].handle))
            check(driver.cuGraphDestroy(graph))
        return ready

    def call(self, which: int = 0) -> None:
        for gpu, graph in self._graphs[which % self.sets].items():
            self._gpus.use(gpu)
            check(driver.cuGraphLaunch(graph, self._gpus.streams[gpu].handle))

    def check(self) -> None:
        self._method.check()

    def _destroy(self) -> None:
        for graphs in self._graphs:
            for gpu, graph in graphs.items():
                self._gpus.use(gpu)
                check(driver.cuGraphExecDestroy(graph))
        self._graphs.clear()


class Chain:
    """Two kernels, one after the other on a stream, as one launch whose arguments may change.

    `launches` are calls of `cuLaunchKernelEx` on that stream with their arguments; `context` is
    that of the stream, which stays current after `__init__`.
    """

    def __init__(
        self,
        context: Any,
        stream: int,
        launches: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
    ) -> None:
        self._context = context
        check(driver.cuCtxSetCurrent(context))
        check(driver.cuStreamBeginCapture(stream, _RELAXED))
        try:
            for launch, args in launches:
                check(launch(*args))
        finally:
            graph = check(driver.cuStreamEndCapture(stream))
        (first,), _ = check(driver.cuGraphGetRootNodes(graph, 1))
        both, _ = check(driver.cuGraphGetNodes(graph, 2))
        nodes = sorted(both, key=lambda node: int(node) != int(first))
        self._nodes = [(node, check(driver.cuGraphKernelNodeGetParams(node))) for node in nodes]
        self._stream = driver.CUstream(stream)
        self._arguments: Sequence[Argument] | None = None
        self._ready = check(driver.cuGraphInstantiate(graph, 0))

    def launch(self, arguments: Sequence[Argument]) -> tuple[Any, ...]:
        """Enqueue both with these arguments; gives the status as the driver does."""
        if arguments is not self._arguments:
            before = check(driver.cuCtxGetCurrent())
            check(driver.cuCtxSetCurrent(self._context))
            try:
                self._set(arguments)
            finally:
                check(driver.cuCtxSetCurrent(before))
        return driver.cuGraphLaunch(self._ready, self._stream)

    def _set(self, arguments: Sequence[Argument]) -> None:
        self._arguments = None
        for (node, params), argument in zip(self._nodes, arguments, strict=True):
            params.kernelParams = argument.address
            check(driver.cuGraphExecKernelNodeSetParams(self._ready, node, params))
        self._arguments = arguments
