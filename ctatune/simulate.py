"""Discrete-event simulation of a schedule: every tile, panel counter, flag and port of a link.

Deterministic: a heap of (time, sequence, event). Nobody polls: the only event is the end of a tile.
It says when its result arrives, and who waits for the last tile of a segment learns that then.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctatune.config import Config
from ctatune.errors import ScheduleError
from ctatune.latency import gpu_parts
from ctatune.limits import slab_columns
from ctatune.machine_model import MachineModel, faded, pace_delay_us, prediction
from ctatune.problem import BF16_BYTES, Problem
from ctatune.records import Prediction
from ctatune.schedule import DOWN, NOTHING, PARTIAL, UP, Schedule, build

SIMULATOR = "simulator-10"


class TileSpan(NamedTuple):
    """One tile in a CTA, waits included: from the first load to the result in shared memory."""

    gpu: int
    cta: int
    layer: int
    row: int
    col: int
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What happened in one call. `tiles` in the order in which they ended; 0 is the launch."""

    total_us: float
    tiles: tuple[TileSpan, ...]


def simulate(problem: Problem, config: Config, machine: MachineModel) -> Prediction:
    """Latency of a valid CTA-pipelined config on `problem.gpus` GPUs like those of the machine."""
    total_us = run(build(problem, config), machine).total_us * machine.factor(config)
    doubt = machine.doubt(problem, config, machine.simulator_log_sigma)
    return prediction(total_us, doubt, SIMULATOR)


def run(schedule: Schedule, machine: MachineModel) -> Timeline:
    """The timeline of one call.

    Raises: ScheduleError when a CTA waits for a segment of a panel that never becomes complete.
    """
    return _Simulation(schedule, machine).run()


@dataclass(slots=True, kw_only=True)
class _Cta:
    gpu: int
    index: int
    tiles: list[list[int]]  # its share of the GPU's list
    now_us: float  # as far as it has come
    done: int = 0  # tiles
    started_us: float = 0.0  # its tile
    drained_us: float = 0.0  # its slabs are empty again
    told_us: float = 0.0  # its store warp is through with the tile before
    summed: int = 0  # segments of its `down` tile

    @property
    def tile(self) -> list[int]:
        return self.tiles[self.done]


@dataclass(slots=True)
class _Arrivals:
    """One segment of one panel on one GPU."""

    missing: int
    complete_us: float = 0.0  # when all have arrived, once none is missing
    waiting: list[_Cta] = field(default_factory=list)


class _Simulation:
    """State of the whole machine; `seen` by GPU, panel and segment."""

    def __init__(self, schedule: Schedule, machine: MachineModel) -> None:
        problem, config = schedule.problem, schedule.config
        self.schedule, self.machine = schedule, machine
        self.parts = gpu_parts(problem, config, machine)
        self.ctas = self.parts[0][UP].work.ctas
        self.layer_tiles = [schedule.tile_of(layer) for layer in (UP, DOWN, PARTIAL)]
        self.outputs = [problem.h, problem.n, problem.n]
        self.link_us, self.local_us = machine.link_us(1.0), machine.local_store_us(1.0)  # a byte
        self.tile_us = [
            [(part.tile_us, part.last_us(part.work.tiles % self.ctas)) for part in gpu]
            for gpu in self.parts
        ]
        self.ahead_us = [
            tuple(down.time.ahead_us(n) for n in (down.work.active, down.work.tiles % self.ctas))
            for _, down in self.parts
        ]
        # What a segment, or what another GPU summed over it, takes of the time of a `down` tile.
        widest = max(columns.width for columns in schedule.segments)
        whole = widest if schedule.reduces else problem.h
        self.parts_of_sum = [columns.width / whole for columns in schedule.segments]
        self.parts_of_sum += [config.down.n / whole] * len(schedule.segments)
        self.arrivals = [schedule.arrivals(gpu) for gpu in range(problem.gpus)]
        self.buffered = [min(1.0, config.d_slabs * slab_columns(t) / t.n) for t in self.layer_tiles]
        self.epilogue_us = [machine.epilogue_us(tile) for tile in self.layer_tiles]
        self.egress_us, self.ingress_us = [0.0] * problem.gpus, [0.0] * problem.gpus
        self.seen = {
            (gpu, panel, segment): _Arrivals(count)
            for gpu in range(problem.gpus)
            for panel in range(schedule.panels)
            for segment, count in enumerate(self.arrivals[gpu])
        }
        self.heap: list[tuple[float, int, _Cta]] = []
        self.sequence = itertools.count()
        self.spans: list[TileSpan] = []
        self.end_us = 0.0

    def run(self) -> Timeline:
        for gpu in range(self.schedule.problem.gpus):
            slots = self._slots(gpu)
            for index in range(self.ctas):
                own = [s for s in slots[index :: self.ctas].tolist() if s[0] != NOTHING]
                self._start(_Cta(gpu=gpu, index=index, tiles=own, now_us=self.machine.launch_us))
        while self.heap:
            now, _, cta = heappop(self.heap)
            self._tile_end(cta, now)
        self._check_nobody_waits()
        return Timeline(total_us=self.end_us, tiles=tuple(self.spans))

    def _slots(self, gpu: int) -> NDArray[np.int32]:
        """The slots of a GPU, each with whether it belongs to a last, partial wave of a layer."""
        slots = self.schedule.slots(gpu)
        last = np.zeros(len(slots), dtype=np.int32)
        for layers in ((UP,), (PARTIAL, DOWN)):
            (own,) = np.nonzero(np.isin(slots[:, 0], layers))
            last[own[len(own) // self.ctas * self.ctas :]] = 1
        return np.column_stack([slots, last])

    def _check_nobody_waits(self) -> None:
        for (gpu, panel, segment), arrivals in self.seen.items():
            if arrivals.waiting:
                target = self.arrivals[gpu][segment]
                raise ScheduleError(
                    f"CTA {arrivals.waiting[0].index} of GPU {gpu} waits for panel {panel}, "
                    f"segment {segment} for ever, "
                    f"target {target}, value {target - arrivals.missing}"
                )

    def _start(self, cta: _Cta) -> None:
        """Starts the next tile of a CTA when it has one; the burst of its last one costs time."""
        if cta.done == len(cta.tiles):
            return
        cta.started_us = cta.now_us
        if cta.done:
            lost_us = self.parts[cta.gpu][min(cta.tiles[cta.done - 1][0], DOWN)].lost_us
            cta.now_us += lost_us * faded(cta.done - 1)
        if cta.tile[0] != UP:
            cta.summed = 0
            self._sum(cta)
        else:
            cta.now_us += self.tile_us[cta.gpu][UP][cta.tile[-1]]
            self._finish(cta)

    def _sum(self, cta: _Cta) -> None:
        """Sums over the segments of a `down` tile up to the first whose arrival is not known."""
        layer, row, _, _, first, _, last = cta.tile
        schedule, tile_us = self.schedule, self.tile_us[cta.gpu][DOWN][last]
        for segment in schedule.awaits(layer, first)[cta.summed :]:
            wait_us = 0.0
            for panel in schedule.panels_of(row):
                arrivals = self.seen[cta.gpu, panel, segment]
                if arrivals.missing:
                    arrivals.waiting.append(cta)
                    return
                wait_us = max(wait_us, arrivals.complete_us - cta.now_us)
            part_us = self.parts_of_sum[segment] * tile_us
            ahead_us = min(self.ahead_us[cta.gpu][last], wait_us, part_us)
            if not cta.summed:
                cta.started_us += wait_us
            cta.now_us += wait_us + part_us - ahead_us
            cta.summed += 1
        self._finish(cta)

    def _finish(self, cta: _Cta) -> None:
        """The result needs empty slabs, too."""
        end_us = max(cta.now_us, cta.drained_us + self.epilogue_us[cta.tile[0]])
        heappush(self.heap, (end_us, next(self.sequence), cta))

    def _tile_end(self, cta: _Cta, now: float) -> None:
        """The result of a tile is computed: stores it, counts it, starts the CTA's next tile."""
        layer, row, _, col, *_ = cta.tile
        self.spans.append(TileSpan(cta.gpu, cta.index, layer, row, col, cta.started_us, now))
        cta.drained_us = self._store(cta, now)
        cta.now_us = now + (1.0 - self.buffered[layer]) * (cta.drained_us - now)
        cta.done += 1
        self._start(cta)

    def _store(self, cta: _Cta, now: float) -> float:
        """Stores a tile to all its destinations; returns when the last of them has it."""
        layer, row, _, col, segment, *_ = cta.tile
        tile, pace_us = self.layer_tiles[layer], self.schedule.config.pace_us
        rows = min(tile.m, self.schedule.problem.m - row)
        columns = min(tile.n, self.outputs[layer] - col)
        size_bytes = BF16_BYTES * rows * columns / tile.split_k
        link_us = size_bytes * self.link_us
        late_us = 0.0  # how late the last slab leaves for peers; a CTA's last tile is not paced
        if pace_us and cta.done + 1 < len(cta.tiles):
            late_us = pace_delay_us(tile, pace_us, cta.index / self.ctas)
            late_us += self.machine.flag_us * (layer == UP)  # this GPU is told first
        receivers, counter = self.schedule.delivers(cta.gpu, layer, col, segment)
        first_us = max(now, cta.told_us)
        last_us = now
        for peer in receivers:
            if peer == cta.gpu:
                done_us = told_us = first_us + size_bytes * self.local_us
            else:
                sent_us = self._transfer(cta.gpu, peer, link_us, first_us)
                done_us = max(sent_us, first_us + late_us + link_us)
                told_us = done_us + self.machine.flag_us
            last_us = max(last_us, done_us)
            cta.told_us = max(cta.told_us, told_us)
            if counter is not None:
                self._arrive(peer, row // tile.m, counter, told_us)
            else:
                self.end_us = max(self.end_us, told_us)
        return last_us

    def _transfer(self, gpu: int, peer: int, link_us: float, now: float) -> float:
        """When a tile is there: the sender's and the receiver's port have both carried it.

        Each port is a serial server that takes the transfer at the time of the store, so that no
        port idles while another transfer waits for it.
        """
        self.egress_us[gpu] = sent_us = max(now, self.egress_us[gpu]) + link_us
        self.ingress_us[peer] = received_us = max(now, self.ingress_us[peer]) + link_us
        return max(sent_us, received_us)

    def _arrive(self, gpu: int, panel: int, segment: int, time_us: float) -> None:
        """Counts a tile of Y1; with the last one the CTAs that wait for its segment go on."""
        arrivals = self.seen[gpu, panel, segment]
        arrivals.complete_us = max(arrivals.complete_us, time_us)
        arrivals.missing -= 1
        if arrivals.missing == 0:
            waiting, arrivals.waiting = arrivals.waiting, []
            for cta in waiting:
                self._sum(cta)
