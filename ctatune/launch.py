"""Puts a schedule on the GPUs: Y1, flags, tile lists, parameter blocks; and calls the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctatune import abi
from ctatune.abi import ERROR, PARAMS, STAMPS, Argument, Flags
from ctatune.gpus import LINE_BYTES, Arena, Gpus
from ctatune.kernel import Kernel
from ctatune.layout import pitch
from ctatune.limits import TILE_K
from ctatune.problem import BF16_BYTES, MAX_GPUS
from ctatune.schedule import PARTIAL, UP, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """One set of inputs and outputs, a pointer for each GPU (0 where a GPU has no part; but for y2
    also where it belongs to another process).

    Shapes: x m x k, w_up (own columns of up) x k, w_down (own columns of down) x h, or where Y2 is
    summed over GPUs n x (own columns of up), y2 m x n. Rows of weights are `layout.pitch` apart.
    """

    x: tuple[int, ...]
    w_up: tuple[int, ...]
    w_down: tuple[int, ...]
    y2: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What schedules whose calls never overlap may share, where other processes may have some GPUs.

    `here` are the numbers that a schedule has for the GPUs of this process. `y1` points to room for
    Y1 on each GPU (two planes, as wide as any schedule's), `error` to a zeroed record on each one
    here. `zeros` gives so many zeroed bytes on each GPU, for as long as the arena is open.
    """

    here: Sequence[int]
    y1: tuple[int, ...]
    error: tuple[int, ...]
    zeros: Callable[[Arena, int], Sequence[int]]

    def check(self, gpus: Gpus) -> None:
        """Raise PipelineTimeoutError if a poll of a finished call ran out of time."""
        for i, (gpu, pointer) in enumerate(zip(self.here, self.error, strict=True)):
            abi.raise_poll_error(gpus, i, pointer, gpu)


class PlacedSchedule:
    """A schedule placed on GPUs: its workspace, flags, and a parameter block a set of operands.

    Calls are enqueued on the streams of `gpus`, one call at a time; buffers belong to `arena`.
    `kernel` and `workspace` may be shared with others; without, they are made. `skip_wait` builds
    the negative control; `stamps` keeps the times of every tile of a call.
    """

    def __init__(
        self,
        gpus: Gpus,
        arena: Arena,
        schedule: Schedule,
        sets: list[Operands],
        *,
        kernel: Kernel | None = None,
        workspace: Workspace | None = None,
        skip_wait: bool = False,
        stamps: bool = False,
    ) -> None:
        self._gpus = gpus
        self.schedule = schedule
        self._kernel = kernel or Kernel(gpus, schedule.config, skip_wait=skip_wait)
        self.ctas, self.build = self._kernel.ctas, self._kernel.build
        self._workspace = workspace or self._own_workspace(arena)
        self._here = self._workspace.here
        self._place(arena)
        self._stamps = dict.fromkeys(self._here, 0)
        for i, gpu in enumerate(self._here if stamps else ()):
            self._stamps[gpu] = arena.zeros(i, len(self._slots[gpu]) * len(STAMPS) * 8)
        self._arguments = [
            [Argument(self._block(gpu, operands)) for gpu in self._here] for operands in sets
        ]

    @property
    def _all(self) -> range:
        return range(self.schedule.problem.gpus)

    @property
    def _y1_gpus(self) -> Sequence[int]:
        """GPUs whose Y1 is written, by themselves or by others."""
        return self._all if self.schedule.reduces else self.schedule.y1_gpus

    @property
    def _y1_bytes(self) -> int:
        return 2 * self.schedule.problem.m * self.schedule.y1_width * BF16_BYTES

    def _own_workspace(self, arena: Arena) -> Workspace:
        """That of this schedule alone, all of whose GPUs are here."""
        everyone, holders = self._all, self._y1_gpus
        return Workspace(
            here=everyone,
            y1=tuple(arena.alloc(g, self._y1_bytes) if g in holders else 0 for g in everyone),
            error=tuple(arena.zeros(gpu, ERROR.itemsize) for gpu in everyone),
            zeros=lambda own, nbytes: [own.zeros(gpu, nbytes) for gpu in everyone],
        )

    def _place(self, arena: Arena) -> None:
        schedule, workspace = self.schedule, self._workspace
        panels = schedule.panels * len(schedule.arrivals(0))
        lines = workspace.zeros(arena, Flags.nbytes(panels))  # first what processes do together
        self._y1, self._flags = workspace.y1, [Flags.at(pointer, panels) for pointer in lines]
        width = schedule.config.down.n if schedule.reduces else 0
        ones = abi.bf16_bits(np.eye(width, dtype=np.float32))
        self._ones, self._slots, self._tiles = {}, {}, {}
        for i, gpu in enumerate(self._here):
            self._ones[gpu] = arena.upload(i, ones) if width else 0
            self._slots[gpu] = schedule.slots(gpu)
            self._tiles[gpu] = arena.upload(i, self._packed(gpu))

    def _packed(self, gpu: int) -> NDArray[np.int32]:
        """The slots of a GPU as the kernel reads them."""
        slots = self._slots[gpu]
        places = np.zeros(len(slots), np.int32)
        for i in np.flatnonzero(slots[:, 0] == PARTIAL):
            places[i] = _nearest(gpu, self._all).index(self.schedule.owner(int(slots[i, 3])))
        return abi.packed(slots, places)

    def poison(self) -> None:
        """Fill Y1 with NaN (all bits set), each GPU on its stream: synchronise before a call."""
        for gpu in self._y1_gpus:
            self._gpus.fill(gpu, self._y1[gpu], 0xFF, self._y1_bytes)

    def moved(self, x: Sequence[int], y2: Sequence[int]) -> list[Argument]:
        """What the kernel of each GPU here takes for the first set with X and Y2 elsewhere."""
        blocks = [argument.block.copy() for argument in self._arguments[0]]
        for gpu, block in zip(self._here, blocks, strict=True):
            self._write_ends(block, gpu, x, y2)
        return [Argument(block) for block in blocks]

    def _block(self, gpu: int, operands: Operands) -> Any:
        p = np.zeros((), dtype=PARAMS)
        self._write_maps(p, gpu, operands)
        self._write_ends(p, gpu, operands.x, operands.y2)
        self._write_flags(p, gpu)
        schedule, problem, config = self.schedule, self.schedule.problem, self.schedule.config
        p["tiles"], p["tile_count"] = self._tiles[gpu], len(self._slots[gpu])
        p["stamps"] = self._stamps[gpu]
        p["m"], p["h"], p["n"] = problem.m, schedule.y1_width, problem.n
        p["up_k_blocks"] = -(-problem.k // TILE_K)
        p["x_box_bytes"] = abi.in_box_bytes(config.up, problem.m)
        p["y1_box_bytes"] = abi.in_box_bytes(config.down, problem.m)
        p["panel_count"] = schedule.panels
        segments, arrivals = schedule.segments, schedule.arrivals(gpu)
        p["pace_ns"] = round(1000 * config.pace_us)
        p["y1_parity"] = 1
        p["segment_count"], p["flag_segments"] = len(segments), len(arrivals)
        p["segment_tiles"][: len(arrivals)] = arrivals
        p["segment_block"][: len(segments)] = [segment.start // TILE_K for segment in segments]
        p["segment_block"][len(segments)] = -(-problem.h // TILE_K)
        return p

    def _write_maps(self, p: Any, gpu: int, operands: Operands) -> None:
        problem, config = self.schedule.problem, self.schedule.config
        y1_sizes = 2, problem.m, self.schedule.y1_width
        columns = self.schedule.columns
        if own := columns[UP][gpu].width:
            sizes = own, problem.k
            p["w_up"] = abi.weight_map(
                operands.w_up[gpu], sizes, config.up, config, pitch(problem.k)
            )
            for i, to in enumerate(_nearest(gpu, self._y1_gpus)):
                p["y1_to"][i] = self._y1[to]
                p["y1_out"][i] = abi.out_map(self._y1[to], y1_sizes, config.up)
        held = self.schedule.w_down_held(gpu)
        if held[0].width:
            sizes = tuple(part.width for part in held)
            p["w_down"] = abi.weight_map(
                operands.w_down[gpu], sizes, config.down, config, pitch(sizes[1])
            )
            p["w_down_column"] = held[1].start
            p["y1"] = abi.in_maps(self._y1[gpu], y1_sizes, config.down)
        if self.schedule.reduces:
            sizes = config.down.n, config.down.n
            p["ones"] = abi.weight_map(self._ones[gpu], sizes, config.down, config)
            for i, to in enumerate(_nearest(gpu, self._all)):
                p["partial_column"][i] = self.schedule.partial_column(to)
            p["partial_width"] = self.schedule.partial_width

    def _write_ends(self, p: Any, gpu: int, x: Sequence[int], y2: Sequence[int]) -> None:
        problem, config = self.schedule.problem, self.schedule.config
        m = problem.m
        p["x"] = abi.in_maps(x[gpu], (m, problem.k), config.up)
        for i, to in enumerate(_nearest(gpu, self.schedule.y2_gpus[gpu])):
            p["y2_to"][i] = y2[to]
            p["y2_out"][i] = abi.out_map(y2[to], (m, problem.n), config.down)

    def _write_flags(self, p: Any, gpu: int) -> None:
        schedule = self.schedule
        works = schedule.columns[UP][gpu].width > 0
        y1_gpus = _nearest(gpu, schedule.y1_receivers(gpu) if works else ())
        flagged = _nearest(gpu, self._y1_gpus if works else ())  # partial sums too
        y2_gpus = _nearest(gpu, schedule.y2_gpus[gpu])
        y2_peers = [to for to in y2_gpus if to != gpu]
        p["y1_outs"], p["y2_outs"] = len(y1_gpus), len(y2_gpus)
        p["y1_own"], p["y2_own"] = gpu in y1_gpus, gpu in y2_gpus
        p["y1_gpu"][: len(flagged)] = flagged
        p["y2_gpu"][: len(y2_gpus)] = y2_gpus
        p["panels_out"][: len(flagged)] = [self._flags[to].panels for to in flagged]
        p["arrived_outs"] = len(y2_peers)
        p["arrived_out"][: len(y2_peers)] = [self._flags[to].arrived for to in y2_peers]
        p["arrivals"] = self.ctas * len(schedule.senders(gpu))
        p["peers"] = len(self._all)
        p["started_out"][: len(self._all)] = [f.started + gpu * LINE_BYTES for f in self._flags]
        self._flags[gpu].write(p)
        p["error"] = self._workspace.error[self._here.index(gpu)]

    def call(self, which: int = 0) -> None:
        """Enqueue one call on operand set `which` on every GPU."""
        for gpu in self._all:
            self.call_on(gpu, which)

    def call_on(self, gpu: int, which: int = 0) -> None:
        """Enqueue one GPU's part of a call; it waits for the parts of the others."""
        self._kernel.launch(gpu, self._arguments[which % len(self._arguments)][gpu])

    def check(self) -> None:
        """Raise PipelineTimeoutError if a poll of a finished call ran out of time."""
        self._workspace.check(self._gpus)

    def stamps(self, gpu: int) -> NDArray[np.int64]:
        """Times of the last call on `gpu`: slots x STAMPS, in ns of that GPU's global timer."""
        shape = (len(self._slots[gpu]), len(STAMPS))
        return self._gpus.download(gpu, self._stamps[gpu], shape, np.int64)


def _nearest(gpu: int, receivers: Sequence[int]) -> list[int]:
    """Receivers in the order in which `gpu` serves them: itself first, then its next peers."""
    return sorted(receivers, key=lambda to: (to - gpu) % MAX_GPUS)
