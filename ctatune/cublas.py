"""bf16 GEMMs by cuBLAS through nvmath-python's bindings, on any GPU of the process."""

# The extra is not installed where the code is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import numpy as np

from ctatune.errors import DeviceError
from ctatune.gpus import Arena, Gpus

_WORKSPACE_BYTES = 32 << 20  # what cuBLAS recommends on Hopper
_BF16 = 14  # CUDA_R_16BF
_DEFAULT_ALGORITHM = -1


class Cublas:
    """A handle on each GPU, with fp32 sums, for the life of the process."""

    def __init__(self, gpus: Gpus) -> None:
        from nvmath.bindings import cublas

        self._gpus, self._cublas = gpus, cublas
        self._handles: list[Any] = []
        arena = Arena(gpus)
        try:
            for gpu in range(len(gpus)):
                gpus.use(gpu)
                self._handles.append(cublas.create())
                workspace = arena.alloc(gpu, _WORKSPACE_BYTES)
                cublas.set_stream(self._handles[gpu], int(gpus.streams[gpu].handle))
                cublas.set_workspace(self._handles[gpu], workspace, _WORKSPACE_BYTES)
        except (RuntimeError, cublas.cuBLASError) as error:
            raise DeviceError(f"cuBLAS cannot start: {error}") from error
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    def gemm(self, gpu: int, x: int, w: int, y: int, sizes: tuple[int, int, int]) -> None:
        """Enqueue Y = X W^T; `sizes` is (m, n, k), X is m x k, W is n x k, Y is m x n.

        Row-major Y = X W^T is column-major Y^T = (W as k x n)^T (X as k x m).
        """
        m, n, k = sizes
        c = self._cublas
        self._gpus.use(gpu)
        c.gemm_ex(
            self._handles[gpu],
            c.Operation.T,
            c.Operation.N,
            *(n, m, k),
            self._one.ctypes.data,
            *(w, _BF16, k),
            *(x, _BF16, k),
            self._zero.ctypes.data,
            *(y, _BF16, n),
            c.ComputeType.COMPUTE_32F,
            _DEFAULT_ALGORITHM,
        )
