"""The opponents: ways to run the problem without our kernel. `single` is cuBLAS on one GPU.

Needs the extra `baselines` (nvmath-python and cuBLAS); `why_missing` says what lacks.
"""

# The extra is not installed where the code is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util

import numpy as np

from ctatune.errors import DeviceError
from ctatune.gpus import Arena, Gpus
from ctatune.launch import BF16_BYTES
from ctatune.operands import Inputs
from ctatune.problem import Problem
from ctatune.schedule import Columns

_WORKSPACE_BYTES = 32 << 20  # what cuBLAS recommends on Hopper


def why_missing() -> str | None:
    """Why baselines cannot run here, or None."""
    if importlib.util.find_spec("nvmath") is None:
        return "nvmath-python is not installed (extra `baselines`)"
    return None


class Single:
    """Both layers by cuBLAS on GPU 0, with all weights there. Y2 ends on GPU 0 alone."""

    def __init__(
        self, gpus: Gpus, arena: Arena, problem: Problem, inputs: Inputs, sets: int
    ) -> None:
        from nvmath.bindings import cublas

        self._gpus, self._problem, self._cublas = gpus, problem, cublas
        gpus.use(0)
        try:
            self._handle = cublas.create()
        except (RuntimeError, cublas.cuBLASError) as error:
            raise DeviceError(f"cuBLAS cannot start: {error}") from error
        cublas.set_stream(self._handle, int(gpus.streams[0].handle))
        workspace = arena.alloc(0, _WORKSPACE_BYTES)
        cublas.set_workspace(self._handle, workspace, _WORKSPACE_BYTES)
        self._y1 = arena.alloc(0, problem.m * problem.h * BF16_BYTES)
        self.y2 = inputs.y2(0)
        up, down = Columns(0, problem.h), Columns(0, problem.n)
        self._sets = [
            (inputs.x(0, i), inputs.w_up(0, up, i), inputs.w_down(0, down, i)) for i in range(sets)
        ]
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    def call(self, which: int = 0) -> None:
        """Enqueue one call on operand set `which`."""
        x, w_up, w_down = self._sets[which % len(self._sets)]
        self._gpus.use(0)
        self._gemm(x, w_up, self._y1, self._problem.h, self._problem.k)
        self._gemm(self._y1, w_down, self.y2, self._problem.n, self._problem.h)

    def _gemm(self, x: int, w: int, y: int, n: int, k: int) -> None:
        """Row-major Y = X W^T is column-major Y^T = (W as k x n)^T (X as k x m)."""
        c, bf16 = self._cublas, 14  # CUDA_R_16BF
        c.gemm_ex(
            self._handle,
            c.Operation.T,
            c.Operation.N,
            n,
            self._problem.m,
            k,
            self._one.ctypes.data,
            w,
            bf16,
            k,
            x,
            bf16,
            k,
            self._zero.ctypes.data,
            y,
            bf16,
            n,
            c.ComputeType.COMPUTE_32F,
            -1,  # CUBLAS_GEMM_DEFAULT
        )

    def check(self) -> None:
        """Nothing polls here."""

    def close(self) -> None:
        """Destroy the cuBLAS handle."""
        self._cublas.destroy(self._handle)
