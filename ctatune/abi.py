"""What host and kernel agree on: the structs of kernels/mlp.cu and how arguments are written.

A change of `struct Params` there needs the same change of PARAMS here (tests/test_abi.py).
"""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from ctatune.config import Config, Tile
from ctatune.errors import PipelineTimeoutError
from ctatune.gpus import LINE_BYTES, Gpus, check
from ctatune.limits import TILE_K, out_rows, slab_columns
from ctatune.problem import BF16_BYTES, MAX_GPUS

GROUP_THREADS = 128
SEGMENT_UNIT, RECEIVER_UNIT = 256, 65536
POLL_TIMEOUT_NS = 2_000_000_000

PARAMS = np.dtype(
    [
        ("x", "V128", 2),
        ("y1", "V128", 2),
        ("w_up", "V128"),
        ("w_down", "V128"),
        ("ones", "V128"),
        ("y1_out", "V128", MAX_GPUS),
        ("y2_out", "V128", MAX_GPUS),
        ("y1_to", "u8", MAX_GPUS),
        ("y2_to", "u8", MAX_GPUS),
        ("panels_out", "u8", MAX_GPUS),
        ("arrived_out", "u8", MAX_GPUS),
        ("started_out", "u8", MAX_GPUS),
        ("panels", "u8"),
        ("started", "u8"),
        ("arrived", "u8"),
        ("calls", "u8"),
        ("error", "u8"),
        ("tiles", "u8"),
        ("stamps", "u8"),
        ("timeout_ns", "i8"),
        ("tile_count", "i4"),
        ("m", "i4"),
        ("h", "i4"),
        ("n", "i4"),
        ("up_k_blocks", "i4"),
        ("x_box_bytes", "i4", 2),
        ("y1_box_bytes", "i4", 2),
        ("panel_count", "i4"),
        ("segment_count", "i4"),
        ("arrivals", "i4"),
        ("pace_ns", "i4"),
        ("y1_parity", "i4"),
        ("segment_tiles", "i4", 2 * MAX_GPUS),
        ("segment_block", "i4", MAX_GPUS + 1),
        ("y1_outs", "i4"),
        ("y2_outs", "i4"),
        ("arrived_outs", "i4"),
        ("peers", "i4"),
        ("y1_own", "i4"),
        ("y2_own", "i4"),
        ("flag_segments", "i4"),
        ("w_down_column", "i4"),
        ("partial_column", "i4", MAX_GPUS),
        ("partial_width", "i4"),
        ("y1_gpu", "i4", MAX_GPUS),
        ("y2_gpu", "i4", MAX_GPUS),
        ("padding", "V96"),  # the struct is aligned to 128 bytes
    ],
    align=True,
)
STAMPS = (
    "math_waits",
    "math_starts",
    "math_ends",
    "slabs_written",
    "store_starts",
    "stored",
    "load_starts",
    "panel_ready",
)
ERROR = np.dtype([("code", "u4"), ("index", "u4"), ("target", "u4"), ("value", "u4")])
_AWAITED = {1: "panel {} of Y1", 2: "the start of GPU {}", 3: "Y2 of its peers", 4: "the barrier"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags of one GPU that one placed kernel owns: pointers to zeroed lines."""

    panels: int
    started: int
    arrived: int
    calls: int

    @classmethod
    def nbytes(cls, panels: int) -> int:
        """Bytes of flags with `panels` counters of panels for each parity of a call."""
        return (2 * panels + MAX_GPUS + 3) * LINE_BYTES

    @classmethod
    def at(cls, pointer: int, panels: int) -> Flags:
        """Flags in zeroed memory that begins at `pointer`."""
        started = pointer + 2 * panels * LINE_BYTES
        arrived = started + MAX_GPUS * LINE_BYTES
        return cls(
            panels=pointer,
            started=started,
            arrived=arrived,
            calls=arrived + LINE_BYTES,
        )

    def write(self, block: Any) -> None:
        """Make them the own flags of a parameter block, with the time that a poll may take."""
        block["panels"], block["started"] = self.panels, self.started
        block["arrived"], block["calls"] = self.arrived, self.calls
        block["timeout_ns"] = POLL_TIMEOUT_NS


class Argument:
    """A parameter block as the driver takes it: the address of an array with its address."""

    def __init__(self, block: NDArray[Any]) -> None:
        self.block = block
        self._pointers = (ctypes.c_void_p * 1)(block.ctypes.data)
        self.address = ctypes.addressof(self._pointers)


def in_maps(
    pointer: int, sizes: tuple[int, ...], tile: Tile, row_pitch: int | None = None
) -> list[np.void]:
    """X or Y1, of `sizes[-2]` tokens, as CTAs load it: the box of a tile, and that of a tile in the
    last row, which has only the rows that are left. A box that sticks out is slow.
    """
    full, last = _in_box_rows(tile, sizes[-2])
    first = _tensor_map(pointer, sizes, full, TILE_K, row_pitch)
    if last == full:
        return [first, first]
    return [first, _tensor_map(pointer, sizes, last, TILE_K, row_pitch)]


def in_box_bytes(tile: Tile, m: int) -> list[int]:
    """What each box of `in_maps` brings into shared memory."""
    return [rows * TILE_K * BF16_BYTES for rows in _in_box_rows(tile, m)]


def weight_map(
    pointer: int, sizes: tuple[int, ...], tile: Tile, config: Config, row_pitch: int | None = None
) -> np.void:
    """A weight as CTAs load it: both of a multicast pair load a half of a tile's rows."""
    rows = tile.n // 2 if config.pairs(tile) else tile.n
    return _tensor_map(pointer, sizes, rows, TILE_K, row_pitch)


def out_map(
    pointer: int, sizes: tuple[int, ...], tile: Tile, row_pitch: int | None = None
) -> np.void:
    """Y1 or Y2, of `sizes[-2]` tokens, as CTAs store it, slab by slab."""
    rows = min(tile.m, sizes[-2], out_rows(tile))
    return _tensor_map(pointer, sizes, rows, slab_columns(tile), row_pitch)


def _in_box_rows(tile: Tile, m: int) -> tuple[int, int]:
    return min(tile.m, m), (m - 1) % tile.m + 1


def _tensor_map(
    pointer: int, sizes: tuple[int, ...], box_rows: int, box_columns: int, row_pitch: int | None
) -> np.void:
    """A TMA descriptor for bf16 rows: boxes of 64 columns in the 128-byte swizzle, or of 32 in the
    64-byte swizzle.

    `sizes` is (planes?, rows, columns), outermost first, as in NumPy; rows are `row_pitch` elements
    apart (None: dense).
    """
    inner_first = sizes[::-1]
    strides, stride = [], BF16_BYTES
    for size in (row_pitch or sizes[-1], *inner_first[1:-1]):
        stride *= size
        strides.append(driver.cuuint64_t(stride))
    boxes = [box_columns, box_rows, 1][: len(sizes)]
    swizzle = driver.CUtensorMapSwizzle
    swizzles = {64: swizzle.CU_TENSOR_MAP_SWIZZLE_128B, 32: swizzle.CU_TENSOR_MAP_SWIZZLE_64B}
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(sizes),
            pointer,
            [driver.cuuint64_t(size) for size in inner_first],
            strides,
            [driver.cuuint32_t(box) for box in boxes],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles[box_columns],
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return np.void(ctypes.string_at(encoded.getPtr(), 128))


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of values that bf16 holds exactly."""
    return (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def packed(slots: NDArray[np.int32], places: NDArray[np.int32] | int = 0) -> NDArray[np.int32]:
    """Slots as the kernel reads them: above the layer in the first word stands the segment, and
    above that, of partial sums, the place of their receiver in `y1_out`.
    """
    words = slots[:, :4].copy()
    words[:, 0] += SEGMENT_UNIT * slots[:, 4] + RECEIVER_UNIT * places
    return words


def raise_poll_error(gpus: Gpus, gpu: int, pointer: int, number: int | None = None) -> None:
    """Raise PipelineTimeoutError if the error record at `pointer` on `gpu` is filled; `number` is
    what its schedule calls that GPU (None: the same)."""
    error = gpus.download(gpu, pointer, (), ERROR)
    if error["code"]:
        what = _AWAITED[int(error["code"])].format(int(error["index"]))
        who = gpu if number is None else number
        raise PipelineTimeoutError(
            f"GPU {who} waited more than {POLL_TIMEOUT_NS / 1e9:g} s for {what}: "
            f"target {int(error['target'])}, value {int(error['value'])}"
        )
