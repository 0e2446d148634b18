"""Which algorithm a product runs with, on a library that only keeps what it was asked."""

# The extra is not installed where the code is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctatune import cublas
from ctatune.cublas import Cublas
from ctatune.errors import DeviceError
from ctatune.layout import Sizes

bindings = pytest.importorskip("nvmath.bindings")

SIZES = Sizes(64, 512, 250, x_pitch=252, w_pitch=256, y_pitch=520)


class FakeLt:
    """cuBLASLt that offers `offers` algorithms, of which some cannot run."""

    def __init__(self, offers: int, broken: tuple[int, ...] = ()) -> None:
        from nvmath.bindings import cublasLt

        self._real, self.offers, self.broken = cublasLt, offers, broken
        self.ran: list[int] = []
        self.set: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def matrix_layout_create(self, kind: int, rows: int, columns: int, pitch: int) -> int:
        assert kind == 14
        return rows << 40 | columns << 20 | pitch

    def matmul_preference_create(self) -> int:
        return 1

    def matmul_preference_destroy(self, preference: int) -> None:
        assert preference == 1

    def matmul_preference_set_attribute(self, _: int, name: int, at: int, nbytes: int) -> None:
        self.set[name] = int.from_bytes(ctypes.string_at(at, nbytes), "little")

    def matmul_algo_get_heuristic(self, *arguments: int) -> None:
        *_, requested, results, count = arguments
        itemsize = self._real.matmul_heuristic_result_dtype.itemsize
        for i in range(self.offers):
            assert i < requested
            ctypes.memmove(results + i * itemsize, np.uint64(i).tobytes(), 8)
        ctypes.memmove(count, np.int32(self.offers).tobytes(), 4)

    def matmul(self, *arguments: int) -> None:
        w_layout, x_layout, y_layout = arguments[4], arguments[6], arguments[9]
        wanted = ((250, 512, 256), (250, 64, 252), (512, 64, 520))
        layouts = tuple(a << 40 | b << 20 | pitch for a, b, pitch in wanted)
        assert (w_layout, x_layout, y_layout) == layouts
        algorithm = ctypes.c_uint64.from_address(arguments[12]).value
        if algorithm in self.broken:
            raise self._real.cuBLASLtError(15)
        self.ran.append(algorithm)


def blas(lt: FakeLt, times: dict[int, float], monkeypatch) -> Any:
    """A Cublas on one fake GPU where algorithm i takes times[i], cublasGemmEx times[-1]."""
    real: Any = object.__new__(Cublas)
    real._lt, real._cublas = lt, bindings.cublas
    real._gpus = SimpleNamespace(use=lambda _: None, streams=[SimpleNamespace(handle=7)])
    real._faults = (RuntimeError, lt.cuBLASLtError)
    real._lt_handles, real._workspaces, real._plans = [1], [2], {}
    real._product, real._one, real._zero = 3, np.ones(1), np.zeros(1)
    monkeypatch.setattr(real.__class__, "_gemm_ex", lambda *_: lt.ran.append(-1))

    def time_us(_: int, enqueue: Any) -> float:
        enqueue()
        return times[lt.ran[-1]]

    monkeypatch.setattr(real.__class__, "_time_us", lambda _, gpu, run: time_us(gpu, run))
    return real


def test_the_fastest_algorithm_that_runs_is_chosen_once_and_used(monkeypatch):
    lt = FakeLt(3, broken=(1,))
    product = blas(lt, {0: 5.0, 2: 3.0, -1: 4.0}, monkeypatch)
    product.tune(0, 0x1000, 0x2000, 0x3000, SIZES)
    assert lt.ran == [0, 2, -1] * 5 + [2]
    product.tune(0, 0x1000, 0x2000, 0x3000, SIZES)
    product.gemm(0, 0x1100, 0x2000, 0x3000, SIZES)
    assert lt.ran[16:] == [2, 2]
    name = lt.MatmulPreferenceAttribute
    assert lt.set[name.MAX_WORKSPACE_BYTES] == 32 << 20
    assert lt.set[name.REDUCTION_SCHEME_MASK] == 2  # fp32 partial sums
    assert lt.set[name.MIN_ALIGNMENT_D_BYTES] == 256


def test_a_product_at_another_alignment_has_its_own_choice(monkeypatch):
    lt = FakeLt(1)
    product = blas(lt, {0: 1.0, -1: 2.0}, monkeypatch)
    product.tune(0, 0x1000, 0x2000, 0x3010, SIZES)
    assert lt.set[lt.MatmulPreferenceAttribute.MIN_ALIGNMENT_D_BYTES] == 16
    with pytest.raises(KeyError):
        product.gemm(0, 0x1000, 0x2000, 0x3000, SIZES)


def test_gemm_ex_runs_where_the_heuristic_knows_nothing(monkeypatch):
    lt = FakeLt(0)
    product = blas(lt, {-1: 2.0}, monkeypatch)
    product.tune(0, 0x1000, 0x2000, 0x3000, SIZES)
    assert lt.ran == [-1] * 6


def test_sizes_that_nothing_can_compute_are_named(monkeypatch):
    lt = FakeLt(1, broken=(0,))
    product = blas(lt, {}, monkeypatch)

    def refuse(*_: object) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(cublas.Cublas, "_gemm_ex", refuse)
    with pytest.raises(DeviceError, match="no algorithm for m 64 n 512 k 250"):
        product.tune(0, 0x1000, 0x2000, 0x3000, SIZES)
