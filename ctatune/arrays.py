"""Arrays of others, and ours for them: torch, DLPack, `__cuda_array_interface__`, NumPy.

No framework is imported here. NumPy and `__cuda_array_interface__` know no bf16: 16-bit unsigned
integers stand for its bits, in and out.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, NamedTuple

import numpy as np

from ctatune.errors import UsageError
from ctatune.problem import BF16_BYTES

LEGACY_STREAM = 0  # the driver's default stream, which waits for all blocking streams
_CPU, _CUDA, _CUDA_HOST = 1, 2, 3  # DLDeviceType
_UINT, _BFLOAT = 1, 4  # DLDataTypeCode
_NAME = b"dltensor"


Place = tuple[int, tuple[int, ...], "int | None"]  # pointer, shape, GPU: None is the host


class View(NamedTuple):
    """A dense array in memory. `gpu` is None on the host; `owner` keeps the memory alive, but for
    a `GpuArray`: until its Mlp is closed."""

    pointer: int
    shape: tuple[int, ...]
    gpu: int | None
    owner: Any


def where(gpu: int | None) -> str:
    """The place of an array in words."""
    return "the host" if gpu is None else f"GPU {gpu}"


def view(array: Any, name: str, stream: int = LEGACY_STREAM) -> View:
    """What `array` is, ready to be read on `stream`. `name` names it in errors.

    Raises: UsageError when it is no array, not bf16 (or its bits), or not dense in C order.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _of_torch(torch, array, name)
    if isinstance(array, GpuArray):
        return array.view
    if isinstance(array, np.ndarray):
        bf16 = array.dtype == np.uint16 or array.dtype.name == "bfloat16"
        _require(name, bf16, array.dtype, dense=array.flags.c_contiguous)
        return View(array.ctypes.data, array.shape, None, array)
    if hasattr(array, "__dlpack__"):
        return _of_dlpack(array, name, stream)
    if interface := getattr(array, "__cuda_array_interface__", None):
        return _of_interface(array, interface, name)
    raise UsageError(f"{name} must be an array (DLPack, CUDA array interface, NumPy or torch)")


def current_stream(gpu: int) -> int:
    """The stream that the caller enqueues on: torch's current one if torch is in use, else the
    legacy default stream."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch._C._cuda_getCurrentRawStream(gpu)  # the public call makes an object: 2 us
    return LEGACY_STREAM


def _require(name: str, bf16: bool, dtype: object, *, dense: bool) -> None:
    if not bf16:
        rule = "bf16 (or uint16 with its bits where bf16 does not exist)"
        raise UsageError(f"{name} must be {rule}, got {dtype}")
    if not dense:
        raise UsageError(f"{name} must be contiguous: rows one after the other, without gaps")


def _of_torch(torch: Any, tensor: Any, name: str) -> View:
    bf16 = tensor.dtype is torch.bfloat16 or tensor.dtype is getattr(torch, "uint16", None)
    _require(name, bf16, tensor.dtype, dense=tensor.is_contiguous())
    gpu = tensor.get_device()  # -1 on the host; `tensor.device` makes an object
    return View(tensor.data_ptr(), tuple(tensor.shape), gpu if gpu >= 0 else None, tensor)


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Tensor(ctypes.Structure):
    """DLTensor, and the rest of DLManagedTensor behind it (dlpack.h, before version 1)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _of_dlpack(array: Any, name: str, stream: int) -> View:
    """The capsule stays ours and is never marked as used: it frees the tensor when it goes."""
    kind, index = array.__dlpack_device__()
    if kind not in (_CPU, _CUDA, _CUDA_HOST):
        raise UsageError(f"{name} must lie on a CUDA GPU or the host, not on DLPack device {kind}")
    # 1 is what DLPack calls the legacy default stream.
    capsule = array.__dlpack__(stream=stream or 1) if kind == _CUDA else array.__dlpack__()
    tensor = _Tensor.from_address(_pointer_of(capsule, _NAME))
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    bf16 = tensor.code in (_UINT, _BFLOAT) and (tensor.bits, tensor.lanes) == (16, 1)
    dtype = f"DLPack type {tensor.code} of {tensor.bits} bits"
    _require(name, bf16, dtype, dense=strides is None or _dense(shape, strides, 1))
    pointer = (tensor.data or 0) + tensor.byte_offset
    return View(pointer, shape, index if kind == _CUDA else None, (array, capsule))


def _of_interface(array: Any, interface: dict[str, Any], name: str) -> View:
    """The interface does not name the GPU: the driver knows whose memory it is. Its `stream` is not
    waited for: the call's is the one that made the array."""
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    bf16 = interface["typestr"] in ("<u2", "<V2", "|V2")
    dense = strides is None or _dense(shape, tuple(strides), BF16_BYTES)
    _require(name, bf16, interface["typestr"], dense=dense)
    pointer, fixed = interface["data"]
    if fixed and name == "out":
        raise UsageError("out must not be read-only")
    return View(int(pointer), shape, _gpu_of(int(pointer)), array)


def _gpu_of(pointer: int) -> int:
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    from ctatune.gpus import check

    ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(check(driver.cuPointerGetAttribute(ordinal, pointer)))


def _dense(shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> bool:
    """Whether elements follow each other in C order; dimensions of size 1 have no stride."""
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


class GpuArray:
    """A dense bf16 array on a GPU, in memory that its maker owns: `torch.from_dlpack(y)`.

    Read it on the stream of the call that wrote it, before the next call and before its Mlp is
    closed. `__cuda_array_interface__` shows the bits.
    """

    def __init__(self, pointer: int, shape: tuple[int, ...], gpu: int, owner: Any) -> None:
        self.view = View(pointer, shape, gpu, owner)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": "<u2",
            "data": (self.view.pointer, False),
            "strides": None,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.view.gpu or 0

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the array as it is. It is ordered on the stream of its call alone, so
        `stream` must be that one."""
        del stream, max_version
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("an output of ctatune is shown where it is, never copied")
        return _capsule(self.view.pointer, self.shape, self.view.gpu or 0, self)


_shown: dict[int, tuple[Any, ...]] = {}  # what consumers of our capsules use, by address


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int) -> None:
    _shown.pop(address, None)


_peek = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_unused = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop(capsule: int) -> None:
    """A capsule that nobody consumed goes, and its tensor with it."""
    if _is_unused(capsule, _NAME):
        _shown.pop(_peek(capsule, _NAME), None)


_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def _capsule(
    pointer: int,
    shape: tuple[int, ...],
    gpu: int,
    owner: Any,
    kind: int = _CUDA,
    code: int = _BFLOAT,
) -> Any:
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    steps = (ctypes.c_int64 * len(shape))(*(math.prod(shape[i + 1 :]) for i in range(len(shape))))
    tensor = _Tensor(
        data=pointer,
        device=_Device(kind, gpu),
        ndim=len(shape),
        code=code,
        bits=16,
        lanes=1,
        shape=sizes,
        strides=steps,
        deleter=ctypes.cast(_delete, ctypes.c_void_p),
    )
    address = ctypes.addressof(tensor)
    _shown[address] = (tensor, sizes, steps, owner)
    return _new(address, _NAME, ctypes.cast(_drop, ctypes.c_void_p))
