"""What is to be computed: a shape, a dtype, an activation, a placement and a number of GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from ctatune.errors import UsageError

Output = Literal["replicated", "sharded", "last"]
OUTPUTS: tuple[Output, ...] = ("replicated", "sharded", "last")
BF16_BYTES = 2
DTYPES = {"bf16": BF16_BYTES}  # name -> bytes of one element
ACTIVATIONS = ("none",)
MAX_GPUS = 8  # one NVLink island; the kernel's parameter block has room for as many
MAX_DIMENSION = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One GEMM of the chain: (m x inputs) times the transpose of a (outputs x inputs) weight."""

    name: str
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`Y1 = act(X W_up^T)`, `Y2 = Y1 W_down^T` with m tokens on `gpus` GPUs.

    Shapes: X is m x k, W_up is h x k, Y1 is m x h, W_down is n x h, Y2 is m x n.
    X lies on every GPU before the call. `output` says where Y2 lies after it: `replicated`
    (on every GPU), `sharded` (each GPU has the columns that it computed) or `last` (all of it on
    the last GPU).
    """

    m: int
    k: int
    h: int
    n: int
    gpus: int = 1
    dtype: str = "bf16"
    activation: str = "none"
    output: Output = "replicated"

    def __post_init__(self) -> None:
        for name in ("m", "k", "h", "n"):
            _require_whole(name, getattr(self, name), MAX_DIMENSION)
        _require_whole("gpus", self.gpus, MAX_GPUS)
        for name, known in (("dtype", DTYPES), ("activation", ACTIVATIONS), ("output", OUTPUTS)):
            if getattr(self, name) not in known:
                choices = ", ".join(known)
                raise UsageError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")

    @classmethod
    def of(cls, shape: str, **rest: Any) -> Problem:
        """The problem of a shape `MxKxHxN`, or `MxKxH` for n = k."""
        m, k, h, n = parse_shape(shape)
        return cls(m=m, k=k, h=h, n=n, **rest)

    @property
    def layers(self) -> tuple[Layer, Layer]:
        return (
            Layer(name="up", inputs=self.k, outputs=self.h),
            Layer(name="down", inputs=self.h, outputs=self.n),
        )

    def y2_gpus(self, gpu: int) -> tuple[int, ...]:
        """Who must have what `gpu` computes of Y2."""
        everyone = tuple(range(self.gpus))
        return {"replicated": everyone, "sharded": (gpu,), "last": everyone[-1:]}[self.output]

    @property
    def shape(self) -> str:
        """`MxKxHxN`, the name of the shape in commands and in the store."""
        return f"{self.m}x{self.k}x{self.h}x{self.n}"

    @property
    def flops(self) -> float:
        """Floating-point operations of both layers over the whole machine."""
        return 2.0 * self.m * (self.k * self.h + self.h * self.n)

    @property
    def weight_bytes(self) -> int:
        """Bytes of both weights, stored once over the whole machine."""
        return DTYPES[self.dtype] * (self.k * self.h + self.h * self.n)


def _require_whole(name: str, value: object, most: int) -> None:
    whole = hasattr(value, "__index__") and not isinstance(value, bool)  # int, or one of NumPy
    if not whole or not 1 <= value <= most:  # pyright: ignore[reportOperatorIssue]
        raise UsageError(f"{name} must be between 1 and {most}, got {value!r}")


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """`MxKxHxN` -> (m, k, h, n); `MxKxH` is short for n = k.

    Raises: UsageError when the text is no shape or a size is zero.
    """
    text = str(text).lower()
    if not re.fullmatch(r"\d{1,9}(x\d{1,9}){2,3}", text):
        raise UsageError(f"a shape is MxKxHxN or MxKxH, for example 4096x8192x8192; got {text!r}")
    sizes = [int(part) for part in text.split("x")]
    if 0 in sizes:
        raise UsageError(f"every size of a shape must be at least 1; got {text!r}")
    m, k, h = sizes[:3]
    return m, k, h, sizes[3] if len(sizes) == 4 else k
