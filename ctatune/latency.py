"""The first estimate: tile times, waves and one pipeline recurrence, no tile-by-tile schedule.

The list of a CTA is `up` tiles, then `down` tiles. A GPU is done when its fullest CTA is, or when
the CTAs have worked off what was left to do after the last panel that they had to wait for: the
recurrence finish_w = max(finish_{w-1}, ready_w) + tile, solved in closed form (max-plus). A tile
begins with its own GPU's part of a panel, and needs the rest only when it has summed that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache, lru_cache

from ctatune.baseline_latency import baseline_us
from ctatune.config import AnyConfig, Baseline, Config
from ctatune.limits import TILE_K, down_stages, resident_ctas
from ctatune.machine_model import L2_SHARE, MachineModel, faded, pace_delay_us, prediction
from ctatune.problem import Problem
from ctatune.records import Platform, Prediction
from ctatune.schedule import layer_columns
from ctatune.work import Memory, TileTime, Work

ESTIMATE = "estimate-7"
_NONE = Memory(0.0, 0.0, 0.0, 0.0)
_NO_TIME = TileTime(0.0, _NONE, _NONE, 0.0, 0.0)  # of a GPU that has no tiles of a layer
_BURST = 0.5  # part of the last wave's outgoing burst that the spread of its tiles does not hide


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """What one GPU does of one layer in a call."""

    work: Work
    time: TileTime
    tile_us: float
    period_us: float  # from tile to tile of a CTA
    link_us: float  # of one tile to all peers that need it
    late_us: float  # how late the last slab of the last CTA's paced tile leaves
    lost_us: float  # what the first burst of tiles to peers takes from the next tile
    beside: float  # CTAs whose loads would be those of `down` tiles that wait beside a last wave

    def last_us(self, tiles: int) -> float:
        """Time of a tile in a last wave of so many."""
        return self.time.us(tiles + self.beside)


Parts = tuple[Part, Part]
Works = tuple[tuple[Work, float], tuple[Work, float]]  # of both layers, with the peers of each


def estimate(problem: Problem, config: AnyConfig, machine: MachineModel) -> Prediction:
    """Latency of a valid CTA-pipelined config, or of one of `baseline_latency.modelled`.

    Sustained clocks, cold weights, floor subtracted. Source: DESIGN 8; parameters from the machine
    model. Some 350 to 650 us of Python.
    """
    if isinstance(config, Baseline):
        latency_us = baseline_us(problem, config, machine)
    else:
        _, latency_us = _clocked(problem, config, machine)
    return predicted(problem, latency_us * machine.factor(config), machine)


def predicted(problem: Problem, latency_us: float, machine: MachineModel) -> Prediction:
    """A latency of the estimate with the interval that it has for a problem."""
    return prediction(latency_us, machine.doubt(problem, machine.estimate_log_sigma), ESTIMATE)


def _reduced_us(
    gpu: Parts, gpus: int, panels: list[tuple[int, int]], machine: MachineModel
) -> float:
    """When a GPU is done that sums tiles for its peers first, and then adds to its own what they
    summed: transfers hide behind its own tiles, if these are not in the same wave.
    """
    down, work = gpu[1], gpu[1].work
    end_us = _end_us(gpu, Counter([gpu]), panels, machine)
    partial = max(1, work.tiles * (gpus - 1) // gpus)
    own_us = 0.0
    if work.tiles > work.ctas:
        own_us = _span_us(down, work.tiles) - _span_us(down, partial)
    burst_us = ((partial - 1) % work.ctas + 1) * machine.link_us(work.tile_bytes)
    here_us = end_us - own_us + burst_us + machine.flag_us
    inputs = -(-work.inputs // TILE_K) * TILE_K
    ones_us = (gpus - 1) * work.tile.n / inputs * down.tile_us
    return max(end_us, here_us) + ones_us


def gpu_parts(problem: Problem, config: Config, machine: MachineModel) -> list[Parts]:
    """The parts of both layers on each GPU, at the clocks that the power limit leaves; GPUs that
    do the same share the objects."""
    return _clocked(problem, config, machine)[0]


def _clocked(problem: Problem, config: Config, machine: MachineModel) -> tuple[list[Parts], float]:
    """The parts of each GPU, and the latency of a call that they make."""
    panels = _looked_at(problem, config)
    works = _works(problem, config, machine.platform)

    def at(clocks: dict[Works, float]) -> tuple[list[Parts], float]:
        found = {
            gpu: _both(gpu, clocks.get(gpu, 1.0), config.pace_us, machine) for gpu in set(works)
        }
        parts = [found[gpu] for gpu in works]
        gpus = Counter(parts)
        part = 1.0  # of the tiles of Y2 that a GPU sums, those that it sends to all
        if config.down_axis == "h":
            end_us = max(_reduced_us(gpu, problem.gpus, panels, machine) for gpu in gpus)
            part = 1.0 / problem.gpus
        else:
            end_us = max(_end_us(gpu, gpus, panels, machine) for gpu in gpus)
        return parts, machine.launch_us + end_us + _tail_us(problem, gpus, machine, part)

    full, full_us = at({})
    clocks = {
        gpu: machine.clock(sum(machine.energy_pj(work) for work, _ in gpu), full_us)
        for gpu in set(works)
    }
    return (full, full_us) if min(clocks.values()) == 1.0 else at(clocks)


_work = lru_cache(maxsize=1 << 14)(Work)  # many configs share it: those of other mixes and paces


@lru_cache(maxsize=4096)
def _works(problem: Problem, config: Config, platform: Platform) -> tuple[Works, ...]:
    """What each GPU computes of both layers, and to how many peers it sends that."""
    up, down = layer_columns(problem, config)
    ctas = config.ctas or resident_ctas(config, platform.sm_count)
    y1_gpus = sum(columns.width > 0 for columns in down)
    reduces = config.down_axis == "h"

    @cache
    def works(up_columns: int, down_columns: int, y2_peers: float) -> Works:
        if reduces:  # a tile goes to its owner, or from there to all: so many on average
            sizes = (problem.k, up_columns), (up_columns, problem.n)
            y1_peers, y2_peers = 0, 2.0 * (problem.gpus - 1) / problem.gpus
        else:
            sizes = (problem.k, up_columns), (problem.h, down_columns)
            y1_peers = y1_gpus - (down_columns > 0)
        up_work, down_work = (
            _work(
                m=problem.m,
                inputs=inputs,
                columns=columns,
                tile=tile,
                ctas=ctas,
                sharers=2 if config.multicast else 1,
                stages=depth,
                kept_bytes=L2_SHARE * platform.l2_bytes,
            )
            for (inputs, columns), tile, depth in zip(
                sizes,
                config.tiles,
                (config.stages, down_stages(config)),
                strict=True,
            )
        )
        return (up_work, y1_peers), (down_work, y2_peers)

    return tuple(
        works(up[gpu].width, down[gpu].width, sum(to != gpu for to in problem.y2_gpus(gpu)))
        for gpu in range(problem.gpus)
    )


def _both(gpu: Works, clock: float, pace_us: float, machine: MachineModel) -> Parts:
    """CTAs that have no tile of the last wave of `up` begin with `down`: they load what they can
    while they wait for Y1, from the same memory."""
    (up, up_peers), (down, down_peers) = gpu
    second = _part(down, down_peers, clock, pace_us, machine)
    idle, beside = min(-up.tiles % up.ctas, down.tiles), 0.0
    if idle and up.tiles:
        hbm_us = second.time.memory.hbm_us - second.time.memory_ahead.hbm_us
        beside = idle * hbm_us / machine.tile_time(up, clock).memory.hbm_us
    return _part(up, up_peers, clock, pace_us, machine, beside), second


def _part(
    work: Work,
    peers: float,
    clock: float,
    pace_us: float,
    machine: MachineModel,
    beside: float = 0.0,
) -> Part:
    time = machine.tile_time(work, clock) if work.tiles else _NO_TIME
    tile_us = time.us(work.active + beside * (work.tiles < work.ctas))
    late_us = pace_delay_us(work.tile, pace_us, 1.0) if peers else 0.0
    return Part(
        work=work,
        time=time,
        tile_us=tile_us,
        period_us=max(tile_us, late_us + 2.0 * machine.flag_us) if late_us else tile_us,
        link_us=machine.link_us(work.tile_bytes * peers),
        late_us=late_us,
        lost_us=machine.burst_loss_us(work, peers, pace_us, tile_us),
        beside=beside,
    )


def _looked_at(problem: Problem, config: Config) -> list[tuple[int, int]]:
    """The first and the last panel of `down`, with the last of Y1 that each reads."""
    last = -(-problem.m // config.down.m) - 1
    rows = [(panel, min((panel + 1) * config.down.m, problem.m) - 1) for panel in {0, last}]
    return [(panel, row // config.up.m) for panel, row in rows]


def _indices(work: Work, panel: int) -> tuple[int, int]:
    """Indices in the grouped raster of the first and the last tile of a panel."""
    group, split = work.tile.group_m, work.tile.split_k
    first_row = panel // group * group
    first = first_row * work.tiles_n + panel - first_row
    last = first + (work.tiles_n - 1) * min(group, work.tiles_m - first_row)
    return first * split, last * split + split - 1


def _computed_us(gpu: Parts, index: int) -> float:
    """When a GPU has computed its `up` tiles up to one, which ends a panel."""
    up = gpu[0]
    return _span_us(up, index + 1) + up.lost_us * faded(0, (index + 1) / up.work.ctas - 1.0)


def _sent_us(gpu: Parts, panel: int) -> float:
    """When a GPU has sent its part of a panel of Y1.

    Either the link keeps up, and each wave leaves as a burst or at its pace, or the link has been
    busy since the first wave.
    """
    (up, down), work = gpu, gpu[0].work
    index = _indices(work, panel)[1]
    burst_us = (index % work.ctas + 1) * up.link_us
    if index + work.ctas < work.tiles + down.work.tiles:  # not the last tile of its CTA
        burst_us = max(burst_us, up.late_us)
    return max(_computed_us(gpu, index) + burst_us, up.tile_us + (index + 1) * up.link_us)


def _span_us(part: Part, tiles: int) -> float:
    """Time in which the CTAs work off so many tiles of a layer: those of the last wave have L2 and
    HBM for themselves."""
    whole, rest = divmod(tiles, part.work.ctas)
    rest_us = part.last_us(rest) if rest else 0.0
    if not whole:
        return rest_us
    return part.tile_us + (whole - 1) * part.period_us + rest_us


def _end_us(
    gpu: Parts, gpus: Counter[Parts], panels: list[tuple[int, int]], machine: MachineModel
) -> float:
    """When the last CTA of a GPU has its last tile, and that is stored locally."""
    end_us = _unhindered_us(*gpu)
    up, down = gpu
    if not down.work.tiles:
        return end_us + machine.local_store_us(up.work.tile_bytes)
    senders = [peer for peer in gpus if peer[0].work.tiles and (peer is not gpu or gpus[gpu] > 1)]
    first_us = min((peer[0].tile_us for peer in senders), default=0.0)
    row_in_us = 0.0  # a row of tiles through the port of the receiver
    for peer in senders:
        work, count = peer[0].work, gpus[peer] - (peer is gpu)
        row_in_us += count * machine.link_us(work.tiles / work.tiles_m * work.tile_bytes)
    own_part_us = up.work.columns / down.work.inputs * down.tile_us  # summed before a peer's part
    for panel, y1_panel in panels:
        ready_us = 0.0
        if up.work.tiles:
            own_us = _computed_us(gpu, _indices(up.work, y1_panel)[1])
            ready_us = own_us + machine.local_store_us(up.work.tile_bytes)
        if senders:
            sent_us = max(_sent_us(peer, y1_panel) for peer in senders)
            rest_us = max(sent_us, first_us + (y1_panel + 1) * row_in_us) + machine.flag_us
            ready_us = max(ready_us, rest_us - own_part_us)
        left = down.work.tiles - _indices(down.work, panel)[0]
        ahead_us = down.time.ahead_us(min(left, down.work.ctas))
        end_us = max(end_us, ready_us + _span_us(down, left) - ahead_us)
    return end_us + machine.local_store_us(down.work.tile_bytes)


def _unhindered_us(up: Part, down: Part) -> float:
    """Time of the fullest CTA if no panel had to be waited for."""
    ctas, up_tiles = up.work.ctas, up.work.tiles
    tiles = up_tiles + down.work.tiles
    up_us = max(up.period_us, up.work.active * up.link_us)  # a full link holds the CTAs back
    last = tiles % ctas
    fullest_us = 0.0
    for cta in {0, up_tiles % ctas, last}:  # one of each kind of CTA
        ups = -(-(up_tiles - cta) // ctas)
        downs = -(-(tiles - cta) // ctas) - ups
        tiles_us = up.lost_us * faded(0, ups if downs else ups - 1)
        tiles_us += down.lost_us * faded(ups, downs - 1)
        if ups > 0:
            tiles_us += up.tile_us + (ups - 1) * up_us
        if downs > 0:
            tiles_us += down.tile_us + (downs - 1) * down.period_us
        if cta < last:
            part = down if downs else up
            tiles_us += part.last_us(min(last, part.work.tiles)) - part.tile_us
        fullest_us = max(fullest_us, tiles_us)
    return fullest_us


def _tail_us(problem: Problem, gpus: Counter[Parts], machine: MachineModel, part: float) -> float:
    """What the transfer of Y2, of that part of its tiles, adds after the last tile: a burst that
    nothing hides, and a flag."""
    if problem.output == "sharded" or problem.gpus == 1:
        return 0.0
    works = [down.work for _, down in gpus]
    receivers = works if problem.output == "replicated" else works[-1:]
    sent_bytes = sum(gpus[gpu] * gpu[1].work.tiles * gpu[1].work.tile_bytes for gpu in gpus)
    in_us = max(machine.link_us(sent_bytes - work.tiles * work.tile_bytes) for work in receivers)
    workers = [down for _, down in gpus if down.work.tiles]
    link_us = max(in_us, *(down.work.tiles * down.link_us for down in workers))
    compute_us = min(down.work.tiles / down.work.ctas * down.tile_us for down in workers)
    waves = max(1.0, *(part * work.tiles / work.ctas for work in works))
    link_us, compute_us = part * link_us, part * compute_us
    return machine.flag_us + max(_BURST * link_us / waves, link_us - compute_us)
