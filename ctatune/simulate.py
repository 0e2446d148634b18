"""Discrete-event simulation of a schedule: every tile, panel counter, flag and port of a link.

Deterministic: a heap of (time, priority, sequence, event). Nobody polls: there is one event for
the end of each tile and one for each panel that becomes complete on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from ctatune import schedule as schedules
from ctatune.config import Config
from ctatune.latency import gpu_work
from ctatune.machine_model import MachineModel, prediction
from ctatune.problem import Problem
from ctatune.records import Prediction
from ctatune.reference import ScheduleError
from ctatune.schedule import DOWN, UP, Schedule
from ctatune.space import TILE_K

SIMULATOR = "simulator-1"
_PANEL, _TILE = 0, 1  # priority of events at the same time: who waits learns of a panel first


class TileSpan(NamedTuple):
    """One tile in a CTA: from the first load to the result in shared memory."""

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
    timeline = run(schedules.build(problem, config), machine)
    return prediction(timeline.total_us, machine.simulator_log_sigma, SIMULATOR)


def run(schedule: Schedule, machine: MachineModel) -> Timeline:
    """The timeline of one call.

    Raises: ScheduleError when a CTA waits for a panel that never becomes complete.
    """
    return _Simulation(schedule, machine).run()


class _Simulation:
    """State of the whole machine. CTAs are known as (gpu, cta), panels as (gpu, panel)."""

    def __init__(self, schedule: Schedule, machine: MachineModel) -> None:
        problem, config = schedule.problem, schedule.config
        gpus = range(problem.gpus)
        works = gpu_work(problem, config, machine)
        clocks = [machine.clock(machine.busy_us(work)) for work in works]
        self.schedule, self.machine = schedule, machine
        self.ctas = config.ctas or machine.platform.sm_count
        self.lists = [tiles.tolist() for tiles in schedule.tiles]
        self.layer_tiles = (config.up, config.down)
        self.tile_us = [[machine.tile_time_us(work, clocks[g]) for work in works[g]] for g in gpus]
        self.epilogue_us = [machine.epilogue_us(work) for work in works[0]]
        self.buffered = [min(1.0, config.d_slabs * TILE_K / t.n) for t in self.layer_tiles]
        self.position = [list(range(self.ctas)) for _ in gpus]
        self.started_us = [[0.0] * self.ctas for _ in gpus]
        self.free_us = [[machine.launch_us] * self.ctas for _ in gpus]  # for its next tile
        self.drained_us = [[0.0] * self.ctas for _ in gpus]  # its slabs are empty again
        self.egress_us, self.ingress_us = [0.0] * problem.gpus, [0.0] * problem.gpus
        self.missing = [[schedule.tiles_per_panel] * schedule.panels for _ in gpus]
        self.complete_us = [[0.0] * schedule.panels for _ in gpus]
        self.ready = [[False] * schedule.panels for _ in gpus]
        self.waiting: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.sequence = 0
        self.spans: list[TileSpan] = []
        self.end_us = 0.0

    def run(self) -> Timeline:
        for gpu, tiles in enumerate(self.lists):
            for cta in range(min(self.ctas, len(tiles))):
                self._start(gpu, cta, 0.0)
        while self.heap:
            now, priority, _, gpu, index = heappop(self.heap)
            if priority == _PANEL:
                self._panel_complete(gpu, index, now)
            else:
                self._tile_end(gpu, index, now)
        for (gpu, panel), ctas in self.waiting.items():
            target = self.schedule.tiles_per_panel
            value = target - self.missing[gpu][panel]
            raise ScheduleError(
                f"CTA {ctas[0]} of GPU {gpu} waits for panel {panel} for ever, "
                f"target {target}, value {value}"
            )
        return Timeline(total_us=self.end_us, tiles=tuple(self.spans))

    def _push(self, time_us: float, priority: int, gpu: int, index: int) -> None:
        heappush(self.heap, (time_us, priority, self.sequence, gpu, index))
        self.sequence += 1

    def _start(self, gpu: int, cta: int, now: float) -> None:
        """Starts the next tile of a CTA, or lets it wait for the first panel that it lacks."""
        tiles, position = self.lists[gpu], self.position[gpu][cta]
        if position >= len(tiles):
            return
        layer, row = tiles[position][:2]
        if layer == DOWN:
            ready = self.ready[gpu]
            for panel in self.schedule.panels_of(row):
                if not ready[panel]:
                    self.waiting[gpu, panel].append(cta)
                    return
        start_us = max(now, self.free_us[gpu][cta])
        self.started_us[gpu][cta] = start_us
        end_us = max(
            start_us + self.tile_us[gpu][layer],
            self.drained_us[gpu][cta] + self.epilogue_us[layer],
        )
        self._push(end_us, _TILE, gpu, cta)

    def _panel_complete(self, gpu: int, panel: int, now: float) -> None:
        self.ready[gpu][panel] = True
        for cta in self.waiting.pop((gpu, panel), ()):
            self._start(gpu, cta, now)

    def _tile_end(self, gpu: int, cta: int, now: float) -> None:
        """The result of a tile is computed: stores it, counts it, starts the CTA's next tile."""
        layer, row, _, col = self.lists[gpu][self.position[gpu][cta]]
        self.spans.append(TileSpan(gpu, cta, layer, row, col, self.started_us[gpu][cta], now))
        drained_us = self._store(gpu, layer, row, col, now)
        self.drained_us[gpu][cta] = drained_us
        self.free_us[gpu][cta] = now + (1.0 - self.buffered[layer]) * (drained_us - now)
        self.position[gpu][cta] += self.ctas
        self._start(gpu, cta, now)

    def _store(self, gpu: int, layer: int, row: int, col: int, now: float) -> float:
        """Stores a tile to all its destinations; returns when the last of them has it."""
        problem, tile = self.schedule.problem, self.layer_tiles[layer]
        rows = min(tile.m, problem.m - row)
        columns = min(tile.n, problem.layers[layer].outputs - col)
        size_bytes = 2 * rows * columns
        link_us = self.machine.link_us(size_bytes)
        local_us = self.machine.local_store_us(size_bytes)
        last_us = now
        to = self.schedule.y1_gpus if layer == UP else self.schedule.y2_gpus[gpu]
        for peer in to:
            remote = peer != gpu
            done_us = self._transfer(gpu, peer, link_us, now) if remote else now + local_us
            last_us = max(last_us, done_us)
            if layer == UP:
                self._arrive(peer, row // tile.m, done_us + self.machine.flag_us)
            else:
                self.end_us = max(self.end_us, done_us + remote * self.machine.flag_us)
        return last_us

    def _transfer(self, gpu: int, peer: int, link_us: float, now: float) -> float:
        """When a tile is there: the sender's and the receiver's port have both carried it.

        Each port is a serial server that takes the transfer at the time of the store, so that no
        port idles while another transfer waits for it.
        """
        self.egress_us[gpu] = sent_us = max(now, self.egress_us[gpu]) + link_us
        self.ingress_us[peer] = received_us = max(now, self.ingress_us[peer]) + link_us
        return max(sent_us, received_us)

    def _arrive(self, gpu: int, panel: int, time_us: float) -> None:
        """Counts a tile of Y1; the last one makes the panel complete when all have arrived."""
        self.complete_us[gpu][panel] = max(self.complete_us[gpu][panel], time_us)
        self.missing[gpu][panel] -= 1
        if self.missing[gpu][panel] == 0:
            self._push(self.complete_us[gpu][panel], _PANEL, gpu, panel)
