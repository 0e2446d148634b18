"""Puts a schedule on the GPUs: weights, Y1, flags, tile lists, tensor maps; and calls the kernel.

The parameter block mirrors `struct Params` of kernels/mlp.cu.
"""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from ctatune import jit
from ctatune.errors import PipelineTimeoutError
from ctatune.gpus import LINE_BYTES, Arena, Gpus, check
from ctatune.problem import MAX_GPUS
from ctatune.records import KernelBuild
from ctatune.schedule import DOWN, UP, Schedule
from ctatune.space import TILE_K, math_groups, out_rows, smem_bytes

GROUP_THREADS = 128
SEGMENT_UNIT = 256
BF16_BYTES = 2
POLL_TIMEOUT_NS = 2_000_000_000

PARAMS = np.dtype(
    [
        ("x", "V128"),
        ("w_up", "V128"),
        ("w_down", "V128"),
        ("y1", "V128"),
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
        ("x_box_bytes", "i4"),
        ("y1_box_bytes", "i4"),
        ("panel_count", "i4"),
        ("segment_count", "i4"),
        ("arrivals", "i4"),
        ("pace_ns", "i4"),
        ("y1_parity", "i4"),
        ("segment_tiles", "i4", MAX_GPUS),
        ("segment_block", "i4", MAX_GPUS + 1),
        ("y1_outs", "i4"),
        ("y2_outs", "i4"),
        ("arrived_outs", "i4"),
        ("peers", "i4"),
        ("y1_own", "i4"),
        ("y2_own", "i4"),
        ("y1_gpu", "i4", MAX_GPUS),
        ("y2_gpu", "i4", MAX_GPUS),
        ("padding", "V52"),  # the struct is aligned to 128 bytes
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
class Operands:
    """One set of inputs and outputs, a pointer for each GPU (0 where a GPU has no part).

    Shapes: x m x k, w_up (own columns of up) x k, w_down (own columns of down) x h, y2 m x n.
    """

    x: tuple[int, ...]
    w_up: tuple[int, ...]
    w_down: tuple[int, ...]
    y2: tuple[int, ...]


def tensor_map(pointer: int, sizes: tuple[int, ...], box_rows: int) -> bytes:
    """A TMA descriptor for bf16 rows: 64-column boxes of `box_rows` rows in the 128-byte swizzle.

    `sizes` is (planes?, rows, columns), outermost first, as in NumPy.
    """
    inner_first = sizes[::-1]
    strides, pitch = [], BF16_BYTES
    for size in inner_first[:-1]:
        pitch *= size
        strides.append(driver.cuuint64_t(pitch))
    boxes = [TILE_K, box_rows, 1][: len(sizes)]
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
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(encoded.getPtr(), 128)


class Mlp:
    """A schedule placed on GPUs: its workspace, flags, and a parameter block a set of operands.

    Calls are enqueued on the streams of `gpus`, one call at a time; buffers belong to `arena`.
    `skip_wait` builds the negative control; `stamps` keeps the times of every tile of a call.
    """

    def __init__(
        self,
        gpus: Gpus,
        arena: Arena,
        schedule: Schedule,
        sets: list[Operands],
        *,
        skip_wait: bool = False,
        stamps: bool = False,
    ) -> None:
        self._gpus = gpus
        self.schedule = schedule
        config = schedule.config
        cubin = jit.cubin("mlp", jit.preamble(config, skip_wait=skip_wait))
        smem = smem_bytes(config)
        (self._kernel,) = gpus.load(cubin, ["mlp"], smem_bytes=smem)
        self._function = driver.CUfunction(int(self._kernel.handle))
        self._smem_bytes = smem
        self._threads = GROUP_THREADS * (1 + math_groups(config))
        self.ctas = config.ctas or self._resident_ctas()
        self._place_workspace(arena)
        sizes = [len(slots) * len(STAMPS) * 8 if stamps else 0 for slots in self._slots]
        self._stamps = [arena.zeros(g, size) if size else 0 for g, size in enumerate(sizes)]
        self._params = [
            [_Argument(self._fill(gpu, operands)) for gpu in self._all] for operands in sets
        ]

    @property
    def _all(self) -> range:
        return range(self.schedule.problem.gpus)

    def _resident_ctas(self) -> int:
        """CTAs that run at the same time: clusters that fit, since CTAs wait for each other."""
        cluster = self.schedule.config.cluster
        if cluster == 1:
            return self._gpus.sm_count
        size = driver.CUlaunchAttribute()
        size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size.value.clusterDim.x = cluster
        size.value.clusterDim.y = size.value.clusterDim.z = 1
        launch = driver.CUlaunchConfig()
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = cluster, 1, 1
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = self._threads, 1, 1
        launch.sharedMemBytes = self._smem_bytes
        launch.attrs, launch.numAttrs = [size], 1
        clusters = []
        for gpu in self._all:
            self._gpus.use(gpu)
            clusters.append(int(check(driver.cuOccupancyMaxActiveClusters(self._function, launch))))
        return cluster * min(clusters)

    def _place_workspace(self, arena: Arena) -> None:
        problem, schedule = self.schedule.problem, self.schedule
        y1_bytes = 2 * problem.m * problem.h * BF16_BYTES
        self._y1 = [arena.alloc(g, y1_bytes) if g in schedule.y1_gpus else 0 for g in self._all]
        panel_bytes = 2 * schedule.panels * len(schedule.segments) * LINE_BYTES
        self._panels = [arena.zeros(gpu, panel_bytes) for gpu in self._all]
        self._started = [arena.zeros(gpu, MAX_GPUS * LINE_BYTES) for gpu in self._all]
        self._arrived = [arena.zeros(gpu, LINE_BYTES) for gpu in self._all]
        self._calls = [arena.zeros(gpu, 2 * LINE_BYTES) for gpu in self._all]
        self._errors = [arena.zeros(gpu, ERROR.itemsize) for gpu in self._all]
        self._slots = [schedule.slots(gpu) for gpu in self._all]
        self._tiles = [arena.upload(gpu, _packed(self._slots[gpu])) for gpu in self._all]

    def poison(self) -> None:
        """Fill Y1 with NaN (all bits set)."""
        problem = self.schedule.problem
        for gpu in self.schedule.y1_gpus:
            self._gpus.use(gpu)
            count = 2 * problem.m * problem.h * BF16_BYTES
            check(driver.cuMemsetD8(self._y1[gpu], 0xFF, count))

    def _fill(self, gpu: int, operands: Operands) -> Any:
        p = np.zeros((), dtype=PARAMS)
        self._fill_maps(p, gpu, operands)
        self._fill_flags(p, gpu)
        schedule, problem, config = self.schedule, self.schedule.problem, self.schedule.config
        p["tiles"], p["tile_count"] = self._tiles[gpu], len(self._slots[gpu])
        p["stamps"] = self._stamps[gpu]
        p["m"], p["h"], p["n"] = problem.m, problem.h, problem.n
        p["up_k_blocks"] = -(-problem.k // TILE_K)
        p["x_box_bytes"] = _box_rows(config.up.m, problem.m) * TILE_K * BF16_BYTES
        p["y1_box_bytes"] = _box_rows(config.down.m, problem.m) * TILE_K * BF16_BYTES
        p["panel_count"] = schedule.panels
        segments = schedule.segments
        p["pace_ns"] = round(1000 * config.pace_us)
        p["y1_parity"] = 1
        p["segment_count"] = len(segments)
        p["segment_tiles"][: len(segments)] = schedule.segment_arrivals
        p["segment_block"][: len(segments)] = [segment.start // TILE_K for segment in segments]
        p["segment_block"][len(segments)] = -(-problem.h // TILE_K)
        return p

    def _fill_maps(self, p: Any, gpu: int, operands: Operands) -> None:
        problem, config = self.schedule.problem, self.schedule.config
        up_rows = _box_rows(config.up.m, problem.m)
        down_rows = _box_rows(config.down.m, problem.m)
        y1_sizes = (2, problem.m, problem.h)
        columns = self.schedule.columns
        sharers = 2 if config.multicast else 1  # CTAs that load a part of each weight tile
        p["x"] = np.void(tensor_map(operands.x[gpu], (problem.m, problem.k), up_rows))
        if own := columns[UP][gpu].width:
            box = config.up.n // sharers
            p["w_up"] = np.void(tensor_map(operands.w_up[gpu], (own, problem.k), box))
            for i, to in enumerate(_nearest(gpu, self.schedule.y1_gpus)):
                rows = min(up_rows, out_rows(config.up))
                p["y1_to"][i] = self._y1[to]
                p["y1_out"][i] = np.void(tensor_map(self._y1[to], y1_sizes, rows))
        if own := columns[DOWN][gpu].width:
            box = config.down.n // sharers
            p["w_down"] = np.void(tensor_map(operands.w_down[gpu], (own, problem.h), box))
            p["y1"] = np.void(tensor_map(self._y1[gpu], y1_sizes, down_rows))
            for i, to in enumerate(_nearest(gpu, self.schedule.y2_gpus[gpu])):
                y2_sizes = (problem.m, problem.n)
                rows = min(down_rows, out_rows(config.down))
                p["y2_to"][i] = operands.y2[to]
                p["y2_out"][i] = np.void(tensor_map(operands.y2[to], y2_sizes, rows))

    def _fill_flags(self, p: Any, gpu: int) -> None:
        schedule = self.schedule
        y1_gpus = _nearest(gpu, schedule.y1_gpus if schedule.columns[UP][gpu].width else ())
        y2_gpus = _nearest(gpu, schedule.y2_gpus[gpu])
        y2_peers = [to for to in y2_gpus if to != gpu]
        p["y1_outs"], p["y2_outs"] = len(y1_gpus), len(y2_gpus)
        p["y1_own"], p["y2_own"] = gpu in y1_gpus, gpu in y2_gpus
        p["y1_gpu"][: len(y1_gpus)] = y1_gpus
        p["y2_gpu"][: len(y2_gpus)] = y2_gpus
        p["panels_out"][: len(y1_gpus)] = [self._panels[to] for to in y1_gpus]
        p["arrived_outs"] = len(y2_peers)
        p["arrived_out"][: len(y2_peers)] = [self._arrived[to] for to in y2_peers]
        p["arrivals"] = self.ctas * len(schedule.senders(gpu))
        p["peers"] = len(self._all)
        p["started_out"][: len(self._all)] = [s + gpu * LINE_BYTES for s in self._started]
        p["panels"], p["started"] = self._panels[gpu], self._started[gpu]
        p["arrived"], p["calls"] = self._arrived[gpu], self._calls[gpu]
        p["error"], p["timeout_ns"] = self._errors[gpu], POLL_TIMEOUT_NS

    def call(self, which: int = 0) -> None:
        """Enqueue one call on operand set `which` on every GPU."""
        for gpu in self._all:
            self.call_on(gpu, which)

    def call_on(self, gpu: int, which: int = 0) -> None:
        """Enqueue one GPU's part of a call; it waits for the parts of the others."""
        self._gpus.use(gpu)
        params = self._params[which % len(self._params)][gpu]
        stream = self._gpus.streams[gpu].handle
        one = (1, 1)
        check(
            driver.cuLaunchKernel(
                self._function,
                *(self.ctas, *one),
                *(self._threads, *one),
                self._smem_bytes,
                stream,
                params.address,
                0,
            )
        )

    def check(self) -> None:
        """Raise PipelineTimeoutError if a poll of a finished call ran out of time."""
        for gpu in self._all:
            raise_poll_error(self._gpus, gpu, self._errors[gpu])

    def stamps(self, gpu: int) -> NDArray[np.int64]:
        """Times of the last call on `gpu`: slots x STAMPS, in ns of that GPU's global timer."""
        shape = (len(self._slots[gpu]), len(STAMPS))
        return self._gpus.download(gpu, self._stamps[gpu], shape, np.int64)

    def build(self) -> KernelBuild:
        """What the compiler made of the config."""
        attributes = self._kernel.attributes
        return KernelBuild(
            hash=jit.kernel_hash(),
            compiler=jit.compiler_versions(),
            registers=int(attributes.num_regs),
            local_bytes=int(attributes.local_size_bytes),
            smem_bytes=smem_bytes(self.schedule.config),
        )


class _Argument:
    """A parameter block as the driver takes it: the address of an array with its address."""

    def __init__(self, block: NDArray[Any]) -> None:
        self._block = block
        self._pointers = (ctypes.c_void_p * 1)(block.ctypes.data)
        self.address = ctypes.addressof(self._pointers)


def _nearest(gpu: int, receivers: Sequence[int]) -> list[int]:
    """Receivers in the order in which `gpu` serves them: itself first, then its next peers."""
    return sorted(receivers, key=lambda to: (to - gpu) % MAX_GPUS)


def _packed(slots: NDArray[np.int32]) -> NDArray[np.int32]:
    """Slots as the kernel reads them: the segment stands above the layer in the first word."""
    packed = slots[:, :4].copy()
    packed[:, 0] += SEGMENT_UNIT * slots[:, 4]
    return packed


def raise_poll_error(gpus: Gpus, gpu: int, pointer: int) -> None:
    """Raise PipelineTimeoutError if the error record at `pointer` on `gpu` is filled."""
    error = gpus.download(gpu, pointer, (), ERROR)
    if error["code"]:
        what = _AWAITED[int(error["code"])].format(int(error["index"]))
        raise PipelineTimeoutError(
            f"GPU {gpu} waited more than {POLL_TIMEOUT_NS / 1e9:g} s for {what}: "
            f"target {int(error['target'])}, value {int(error['value'])}"
        )


def _box_rows(tile_m: int, m: int) -> int:
    """Rows of a TMA box: no more than exist, since a box that sticks out is slow (DESIGN 4)."""
    return min(tile_m, m)
