"""bf16 GEMMs by cuBLASLt and cuBLAS through nvmath-python's bindings, on any GPU of the process.

For each size the heuristic's best algorithms are timed on the GPU; the fastest one serves.
"""

# The extra is not installed where the code is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctatune.errors import DeviceError
from ctatune.gpus import Arena, Gpus
from ctatune.layout import Sizes

_WORKSPACE_BYTES = 32 << 20  # what cuBLAS recommends on Hopper
_BF16, _FP32 = 14, 0  # CUDA_R_16BF, CUDA_R_32F
_GEMM_EX = 0  # stands for cublasGemmEx, which has kernels for m = 1 that cuBLASLt does not offer
_DEFAULT_ALGORITHM = -1
_ALGORITHMS = 8
_ROUNDS, _WARM_CALLS, _TIMED_CALLS = 5, 1, 4
_MAX_ALIGNMENT = 256  # bytes; what cuBLASLt assumes unless it is told otherwise


class _Plan(NamedTuple):
    """How products of one size run. `algorithm` is an address in `kept`, or _GEMM_EX.

    `w`, `x` and `y` are the layouts of Y^T = (W as k x n)^T (X as k x m), column-major.
    """

    w: int
    x: int
    y: int
    algorithm: int
    kept: NDArray[Any]


class Cublas:
    """Handles on each GPU, with fp32 sums, for the life of the process."""

    def __init__(self, gpus: Gpus) -> None:
        from nvmath.bindings import cublas, cublasLt

        self._gpus, self._cublas, self._lt = gpus, cublas, cublasLt
        self._faults = (RuntimeError, cublas.cuBLASError, cublasLt.cuBLASLtError)
        self._handles: list[Any] = []
        self._lt_handles: list[Any] = []
        self._workspaces: list[int] = []
        self._plans: dict[tuple[Sizes, int], _Plan] = {}
        arena = Arena(gpus)
        try:
            for gpu in range(len(gpus)):
                self._start(gpu, arena.alloc(gpu, _WORKSPACE_BYTES))
            self._product = cublasLt.matmul_desc_create(cublas.ComputeType.COMPUTE_32F, _FP32)
            transpose = np.array([cublas.Operation.T], np.int32)
            attribute = cublasLt.MatmulDescAttribute.TRANSA
            cublasLt.matmul_desc_set_attribute(
                self._product, attribute, transpose.ctypes.data, transpose.nbytes
            )
        except self._faults as error:
            raise DeviceError(f"cuBLAS cannot start: {error}") from error
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    def _start(self, gpu: int, workspace: int) -> None:
        """Both libraries share a workspace: all products of a GPU run in one stream."""
        c = self._cublas
        self._gpus.use(gpu)
        handle = c.create()
        c.set_stream(handle, int(self._gpus.streams[gpu].handle))
        c.set_workspace(handle, workspace, _WORKSPACE_BYTES)
        c.set_math_mode(handle, c.Math.DISALLOW_REDUCED_PRECISION_REDUCTION)
        self._handles.append(handle)
        self._lt_handles.append(self._lt.create())
        self._workspaces.append(workspace)

    def tune(self, gpu: int, x: int, w: int, y: int, sizes: Sizes) -> None:
        """Choose the algorithm for products of these sizes, unless it is chosen; Y is computed.

        Takes up to half a second and waits for the stream of `gpu`: not for the inside of a gate.

        Raises: DeviceError when nothing can compute such a product.
        """
        key = (sizes, _alignment(x, w, y))
        if key not in self._plans:
            self._plans[key] = self._fastest(gpu, (x, w, y), sizes)
        self.gemm(gpu, x, w, y, sizes)

    def gemm(self, gpu: int, x: int, w: int, y: int, sizes: Sizes) -> None:
        """Enqueue Y = X W^T; see `Sizes`.

        `tune` must have seen such operands before.
        """
        plan = self._plans[sizes, _alignment(x, w, y)]
        self._gpus.use(gpu)
        try:
            self._enqueue(gpu, (x, w, y), sizes, plan)
        except self._faults as error:
            raise DeviceError(f"cuBLAS failed at {_name(sizes)}: {error}") from error

    def _enqueue(self, gpu: int, operands: tuple[int, int, int], sizes: Sizes, plan: _Plan) -> None:
        """Row-major Y = X W^T is column-major Y^T = (W as k x n)^T (X as k x m)."""
        x, w, y = operands
        if plan.algorithm == _GEMM_EX:
            self._gemm_ex(gpu, operands, sizes)
            return
        self._lt.matmul(
            self._lt_handles[gpu],
            self._product,
            self._one.ctypes.data,
            *(w, plan.w),
            *(x, plan.x),
            self._zero.ctypes.data,
            *(y, plan.y),
            *(y, plan.y),
            plan.algorithm,
            self._workspaces[gpu],
            _WORKSPACE_BYTES,
            int(self._gpus.streams[gpu].handle),
        )

    def _gemm_ex(self, gpu: int, operands: tuple[int, int, int], sizes: Sizes) -> None:
        (x, w, y), (m, n, k, x_pitch, w_pitch, y_pitch) = operands, sizes
        c = self._cublas
        c.gemm_ex(
            self._handles[gpu],
            c.Operation.T,
            c.Operation.N,
            *(n, m, k),
            self._one.ctypes.data,
            *(w, _BF16, w_pitch),
            *(x, _BF16, x_pitch),
            self._zero.ctypes.data,
            *(y, _BF16, y_pitch),
            c.ComputeType.COMPUTE_32F,
            _DEFAULT_ALGORITHM,
        )

    def _fastest(self, gpu: int, operands: tuple[int, int, int], sizes: Sizes) -> _Plan:
        """Of all that is offered, timed in turns: clocks fall while the first ones run."""
        self._gpus.use(gpu)
        offers = self._offers(gpu, sizes, _alignment(*operands))
        times: dict[int, list[float]] = defaultdict(list)
        for i, plan in list(enumerate(offers)) * _ROUNDS:
            run = partial(self._enqueue, gpu, operands, sizes, plan)
            with suppress(*self._faults):  # one that cannot run these operands after all
                us = self._time_us(gpu, run)  # before `times` has an entry that could stay empty
                times[i].append(us)
        if not times:
            raise DeviceError(f"cuBLAS offers no algorithm for {_name(sizes)}")
        return offers[min(times, key=lambda i: median(times[i]))]

    def _time_us(self, gpu: int, enqueue: Callable[[], None]) -> float:
        """Mean time of a product between two events on the stream of `gpu`."""
        stream = self._gpus.streams[gpu]
        start, end = (self._gpus.event(gpu, timed=True) for _ in range(2))
        for _ in range(_WARM_CALLS):
            enqueue()
        stream.record(start)
        for _ in range(_TIMED_CALLS):
            enqueue()
        stream.record(end)
        end.sync()
        return 1e3 * (end - start) / _TIMED_CALLS

    def _offers(self, gpu: int, sizes: Sizes, alignment: int) -> Sequence[_Plan]:
        """What the heuristic of cuBLASLt offers, and cublasGemmEx."""
        m, n, k, x_pitch, w_pitch, y_pitch = sizes
        lt = self._lt
        w, x, y = (
            lt.matrix_layout_create(_BF16, *layout)
            for layout in ((k, n, w_pitch), (k, m, x_pitch), (n, m, y_pitch))
        )
        result: Any = lt.matmul_heuristic_result_dtype
        found: NDArray[Any] = np.zeros(_ALGORITHMS, result)
        count = np.zeros(1, np.int32)
        preference = self._preference(alignment)
        try:
            lt.matmul_algo_get_heuristic(
                self._lt_handles[gpu],
                self._product,
                *(w, x, y, y),
                preference,
                _ALGORITHMS,
                found.ctypes.data,
                count.ctypes.data,
            )
        except lt.cuBLASLtError:  # its way to say that it knows none
            count[0] = 0
        lt.matmul_preference_destroy(preference)
        good = [i for i in range(int(count[0])) if found["state"][i] == 0]
        algorithms = [found["algo"][i:].ctypes.data for i in good]
        return [_Plan(w, x, y, algorithm, found) for algorithm in [*algorithms, _GEMM_EX]]

    def _preference(self, alignment: int) -> int:
        """fp32 partial sums only: bf16 ones are faster and would be another result."""
        lt = self._lt
        name = lt.MatmulPreferenceAttribute
        wanted = {
            name.MAX_WORKSPACE_BYTES: _WORKSPACE_BYTES,
            name.REDUCTION_SCHEME_MASK: lt.ReductionScheme.COMPUTE_TYPE,
            name.MIN_ALIGNMENT_A_BYTES: alignment,
            name.MIN_ALIGNMENT_B_BYTES: alignment,
            name.MIN_ALIGNMENT_C_BYTES: alignment,
            name.MIN_ALIGNMENT_D_BYTES: alignment,
        }
        preference = lt.matmul_preference_create()
        for attribute, value in wanted.items():
            held = np.array([value], lt.get_matmul_preference_attribute_dtype(attribute))
            lt.matmul_preference_set_attribute(preference, attribute, held.ctypes.data, held.nbytes)
        return preference


def _alignment(*pointers: int) -> int:
    """The largest power of two, up to _MAX_ALIGNMENT, that divides all pointers."""
    bits = _MAX_ALIGNMENT
    for pointer in pointers:
        bits |= pointer
    return bits & -bits


def _name(sizes: Sizes) -> str:
    return f"m {sizes.m} n {sizes.n} k {sizes.k}"
