"""Discrete-event simulation of a schedule: every tile, panel counter, flag and port of a link.

Deterministic: a heap of (time, sequence, event). Nobody polls: the only event is the end of a tile.
It says when its result arrives, and who waits for the last tile of a segment learns that then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from ctatune import schedule as schedules
from ctatune.config import Config
from ctatune.errors import ScheduleError
from ctatune.latency import gpu_work
from ctatune.machine_model import MachineModel, Work, faded, pace_delay_us, prediction
from ctatune.problem import Problem
from ctatune.records import Prediction
from ctatune.schedule import DOWN, UP, Schedule
from ctatune.space import TILE_K

SIMULATOR = "simulator-2"


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
    timeline = run(schedules.build(problem, config), machine)
    return prediction(timeline.total_us, machine.simulator_log_sigma, SIMULATOR)


def run(schedule: Schedule, machine: MachineModel) -> Timeline:
    """The timeline of one call.

    Raises: ScheduleError when a CTA waits for a segment of a panel that never becomes complete.
    """
    return _Simulation(schedule, machine).run()


@dataclass(slots=True)
class _Arrivals:
    """One segment of one panel on one GPU."""

    missing: int
    complete_us: float = 0.0  # when all have arrived, once none is missing
    waiting: list[int] = field(default_factory=list)  # CTAs


class _Simulation:
    """State of the whole machine. CTAs are known as (gpu, cta), `seen` as [gpu][panel][segment]."""

    def __init__(self, schedule: Schedule, machine: MachineModel) -> None:
        problem, config = schedule.problem, schedule.config
        gpus = range(problem.gpus)
        self.schedule, self.machine = schedule, machine
        self.ctas = config.ctas or machine.platform.sm_count
        self.lists = [tiles.tolist() for tiles in schedule.tiles]
        self.layer_tiles = (config.up, config.down)
        self.buffered = [min(1.0, config.d_slabs * TILE_K / t.n) for t in self.layer_tiles]
        self._set_rates(gpu_work(problem, config, machine))
        self.position = [list(range(self.ctas)) for _ in gpus]
        self.started_us = [[0.0] * self.ctas for _ in gpus]
        self.now_us = [[machine.launch_us] * self.ctas for _ in gpus]  # as far as a CTA has come
        self.summed = [[0] * self.ctas for _ in gpus]  # segments of its `down` tile
        self.drained_us = [[0.0] * self.ctas for _ in gpus]  # its slabs are empty again
        self.egress_us, self.ingress_us = [0.0] * problem.gpus, [0.0] * problem.gpus
        self.seen = [
            [[_Arrivals(count) for count in schedule.segment_tiles] for _ in range(schedule.panels)]
            for _ in gpus
        ]
        self.heap: list[tuple[float, int, int, int]] = []
        self.sequence = 0
        self.spans: list[TileSpan] = []
        self.end_us = 0.0

    def _set_rates(self, works: list[tuple[Work, Work]]) -> None:
        """Times of a tile by [gpu][layer], and how a `down` tile divides over the segments."""
        schedule, machine = self.schedule, self.machine
        self.tile_us: list[list[float]] = []
        self.burst_loss_us: list[list[float]] = []  # of the first burst
        for gpu, work in enumerate(works):
            clock = machine.clock(machine.busy_us(work))
            self.tile_us.append([machine.tile_time_us(layer, clock) for layer in work])
            self.burst_loss_us.append([])
            for layer, tile_us in enumerate(self.tile_us[gpu]):
                peers = len(set(self._receivers(gpu, layer)) - {gpu})
                lost_us = machine.burst_loss_us(
                    work[layer], peers, schedule.config.pace_us, tile_us
                )
                self.burst_loss_us[gpu].append(lost_us)
        self.epilogue_us = [machine.epilogue_us(work) for work in works[0]]
        segments = schedule.segments
        self.circles = [schedule.circle(segment) for segment in range(len(segments))]
        self.parts = [segment.width / schedule.problem.h for segment in segments]

    def run(self) -> Timeline:
        for gpu, tiles in enumerate(self.lists):
            for cta in range(min(self.ctas, len(tiles))):
                self._start(gpu, cta)
        while self.heap:
            now, _, gpu, cta = heappop(self.heap)
            self._tile_end(gpu, cta, now)
        self._check_nobody_waits()
        return Timeline(total_us=self.end_us, tiles=tuple(self.spans))

    def _check_nobody_waits(self) -> None:
        for gpu, panels in enumerate(self.seen):
            for panel, segments in enumerate(panels):
                for segment, arrivals in enumerate(segments):
                    target = self.schedule.segment_tiles[segment]
                    if arrivals.waiting:
                        raise ScheduleError(
                            f"CTA {arrivals.waiting[0]} of GPU {gpu} waits for panel {panel}, "
                            f"segment {segment} for ever, "
                            f"target {target}, value {target - arrivals.missing}"
                        )

    def _receivers(self, gpu: int, layer: int) -> tuple[int, ...]:
        return self.schedule.y1_gpus if layer == UP else self.schedule.y2_gpus[gpu]

    def _start(self, gpu: int, cta: int) -> None:
        """Starts the next tile of a CTA when it has one; the burst of its last one costs time."""
        tiles, position = self.lists[gpu], self.position[gpu][cta]
        if position >= len(tiles):
            return
        self.started_us[gpu][cta] = self.now_us[gpu][cta]
        if before := position // self.ctas:
            lost_us = self.burst_loss_us[gpu][tiles[position - self.ctas][0]]
            self.now_us[gpu][cta] += lost_us * faded(before - 1)
        if tiles[position][0] == DOWN:
            self.summed[gpu][cta] = 0
            self._sum(gpu, cta)
        else:
            self.now_us[gpu][cta] += self.tile_us[gpu][UP]
            self._finish(gpu, cta)

    def _sum(self, gpu: int, cta: int) -> None:
        """Sums over the segments of a `down` tile up to the first whose arrival is not known."""
        _, row, _, _, first = self.lists[gpu][self.position[gpu][cta]]
        circle = self.circles[first]
        while self.summed[gpu][cta] < len(circle):
            segment = circle[self.summed[gpu][cta]]
            for panel in self.schedule.panels_of(row):
                arrivals = self.seen[gpu][panel][segment]
                if arrivals.missing:
                    arrivals.waiting.append(cta)
                    return
                self.now_us[gpu][cta] = max(self.now_us[gpu][cta], arrivals.complete_us)
                if not self.summed[gpu][cta]:
                    start_us = max(self.started_us[gpu][cta], arrivals.complete_us)
                    self.started_us[gpu][cta] = start_us
            self.now_us[gpu][cta] += self.parts[segment] * self.tile_us[gpu][DOWN]
            self.summed[gpu][cta] += 1
        self._finish(gpu, cta)

    def _finish(self, gpu: int, cta: int) -> None:
        layer = self.lists[gpu][self.position[gpu][cta]][0]
        drained_us = self.drained_us[gpu][cta] + self.epilogue_us[layer]
        heappush(self.heap, (max(self.now_us[gpu][cta], drained_us), self.sequence, gpu, cta))
        self.sequence += 1

    def _tile_end(self, gpu: int, cta: int, now: float) -> None:
        """The result of a tile is computed: stores it, counts it, starts the CTA's next tile."""
        layer, row, _, col, _ = self.lists[gpu][self.position[gpu][cta]]
        self.spans.append(TileSpan(gpu, cta, layer, row, col, self.started_us[gpu][cta], now))
        drained_us = self._store(gpu, cta, now)
        self.drained_us[gpu][cta] = drained_us
        self.now_us[gpu][cta] = now + (1.0 - self.buffered[layer]) * (drained_us - now)
        self.position[gpu][cta] += self.ctas
        self._start(gpu, cta)

    def _store(self, gpu: int, cta: int, now: float) -> float:
        """Stores a tile to all its destinations; returns when the last of them has it."""
        layer, row, _, col, segment = self.lists[gpu][self.position[gpu][cta]]
        problem, tile = self.schedule.problem, self.layer_tiles[layer]
        rows = min(tile.m, problem.m - row)
        columns = min(tile.n, problem.layers[layer].outputs - col)
        size_bytes = 2 * rows * columns
        link_us = self.machine.link_us(size_bytes)
        local_us = self.machine.local_store_us(size_bytes)
        paced_us = self._paced_us(gpu, cta)
        last_us = now
        for peer in self._receivers(gpu, layer):
            if peer == gpu:
                done_us = told_us = now + local_us
            else:
                done_us = max(self._transfer(gpu, peer, link_us, now), now + paced_us + link_us)
                told_us = done_us + self.machine.flag_us
            last_us = max(last_us, done_us)
            if layer == UP:
                self._arrive(peer, row // tile.m, segment, told_us)
            else:
                self.end_us = max(self.end_us, told_us)
        return last_us

    def _paced_us(self, gpu: int, cta: int) -> float:
        """How late the last slab of a tile leaves for peers; a CTA's last tile is not paced."""
        tiles, position = self.lists[gpu], self.position[gpu][cta]
        if position + self.ctas >= len(tiles):
            return 0.0
        tile, pace_us = self.layer_tiles[tiles[position][0]], self.schedule.config.pace_us
        return pace_delay_us(tile, pace_us, cta / self.ctas)

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
        arrivals = self.seen[gpu][panel][segment]
        arrivals.complete_us = max(arrivals.complete_us, time_us)
        arrivals.missing -= 1
        if arrivals.missing == 0:
            waiting, arrivals.waiting = arrivals.waiting, []
            for cta in waiting:
                self._sum(gpu, cta)
