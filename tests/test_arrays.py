"""Arrays of other libraries in, and ours out."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlp_fakes import OnGpu

from ctatune import arrays
from ctatune.arrays import GpuArray, current_stream, view, where
from ctatune.errors import UsageError

BITS = np.arange(12, dtype=np.uint16).reshape(3, 4)


class Exported:
    """A NumPy array through our capsule, as if it lay in memory of ours on the host."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        return arrays._capsule(BITS.ctypes.data, BITS.shape, 0, BITS, kind=1, code=1)


def test_bits_of_numpy_are_taken_as_they_lie():
    found = view(BITS, "x")
    assert found[:3] == (BITS.ctypes.data, (3, 4), None)
    assert where(found.gpu) == "the host"


def test_a_capsule_is_read_and_is_not_used_up():
    before = len(arrays._shown)
    found = view(Exported(), "x")
    assert found[:3] == (BITS.ctypes.data, (3, 4), None)
    assert len(arrays._shown) == before + 1
    del found
    gc.collect()
    assert len(arrays._shown) == before


def test_a_consumer_of_our_capsule_holds_the_tensor_as_long_as_it_lives():
    before = len(arrays._shown)
    shown = np.from_dlpack(Exported())  # pyright: ignore[reportArgumentType]
    assert (shown == BITS).all()
    assert len(arrays._shown) == before + 1
    del shown
    gc.collect()
    assert len(arrays._shown) == before


def test_an_output_is_on_its_gpu_for_everyone():
    y = GpuArray(4096, (3, 8), 1, None)
    assert y.__dlpack_device__() == (2, 1)
    assert view(y, "x")[:3] == (4096, (3, 8), 1)
    assert view(OnGpu((3, 8), 4096, 1), "x")[:3] == (4096, (3, 8), 1)  # the same capsule, parsed
    interface = y.__cuda_array_interface__
    assert (interface["data"], interface["shape"], interface["typestr"]) == (
        (4096, False),
        (3, 8),
        "<u2",
    )
    with pytest.raises(BufferError, match="never copied"):
        y.__dlpack__(copy=True)


def test_the_stream_of_a_reader_is_told_to_the_producer():
    asked = []

    class Asked(OnGpu):
        def __dlpack__(self, **named: Any) -> Any:
            asked.append(named)
            return super().__dlpack__()

    view(Asked((3, 8), 4096), "x", 77)
    view(Asked((3, 8), 4096), "x")  # the legacy default stream
    assert asked == [{"stream": 77}, {"stream": 1}]


def interface(**changes: Any) -> Any:
    whole = {"shape": (3, 8), "typestr": "<u2", "data": (4096, False), "version": 3} | changes
    return SimpleNamespace(__cuda_array_interface__=whole)


def test_the_cuda_array_interface(monkeypatch):
    monkeypatch.setattr(arrays, "_gpu_of", lambda _: 1)
    assert view(interface(), "x")[:3] == (4096, (3, 8), 1)
    assert view(interface(strides=(16, 2)), "x")[:3] == (4096, (3, 8), 1)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (BITS.T, "x must be contiguous"),
        (BITS.astype(np.float32), "x must be bf16 .* got float32"),
        (BITS.astype(np.float16), "x must be bf16 .* got float16"),
        (OnGpu((3, 8), 4096, code=2), "x must be bf16 .* got DLPack type 2 of 16 bits"),
        (interface(typestr="<f4"), "x must be bf16 .* got <f4"),
        (interface(strides=(32, 2)), "x must be contiguous"),
        ([[1.0]], "x must be an array"),
    ],
    ids=["turned", "fp32", "fp16", "DLPack", "interface", "strides", "list"],
)
def test_what_is_refused(array, message):
    with pytest.raises(UsageError, match=message):
        view(array, "x")


def fake_torch(stream: int) -> Any:
    cuda = SimpleNamespace(is_initialized=lambda: True)
    own = SimpleNamespace(_cuda_getCurrentRawStream=lambda gpu: stream + gpu)
    tensor = type("Tensor", (SimpleNamespace,), {})
    return SimpleNamespace(cuda=cuda, _C=own, Tensor=tensor, bfloat16="torch.bfloat16")


def test_torch_is_asked_only_where_it_is_in_use(monkeypatch):
    assert "torch" not in sys.modules
    assert current_stream(0) == 0
    torch = fake_torch(7)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert current_stream(1) == 8
    torch.cuda.is_initialized = lambda: False
    assert current_stream(1) == 0


def test_a_tensor_of_torch(monkeypatch):
    torch = fake_torch(7)
    monkeypatch.setitem(sys.modules, "torch", torch)
    tensor = torch.Tensor(
        dtype="torch.bfloat16",
        is_contiguous=lambda: True,
        get_device=lambda: 1,
        data_ptr=lambda: 4096,
        shape=(3, 8),
    )
    assert view(tensor, "x")[:3] == (4096, (3, 8), 1)
    tensor.is_contiguous = lambda: False
    with pytest.raises(UsageError, match="w_up must be contiguous"):
        view(tensor, "w_up")
    tensor.dtype = "torch.float16"
    with pytest.raises(UsageError, match=r"w_up must be bf16 .* got torch\.float16"):
        view(tensor, "w_up")
