"""The first estimate: tile times, waves and one pipeline recurrence, no tile-by-tile schedule.

The list of a CTA is `up` tiles, then `down` tiles. A GPU is done when its fullest CTA is, or when
the CTAs have worked off what was left to do after the last panel that they had to wait for: the
recurrence finish_w = max(finish_{w-1}, ready_w) + tile, solved in closed form (max-plus). A tile
begins with its own GPU's part of a panel, and needs the rest only when it has summed that.
"""

from __future__ import annotations

from collections import Counter

from ctatune.baseline_latency import baseline_us
from ctatune.config import AnyConfig, Baseline, Config
from ctatune.limits import TILE_K
from ctatune.machine_model import MachineModel, faded, prediction
from ctatune.parts import Part, Parts, Works, parts_of, works_of
from ctatune.problem import Problem
from ctatune.records import Prediction
from ctatune.work import Work

ESTIMATE = "estimate-10"
_BURST = 0.5  # part of the last wave's outgoing burst that the spread of its tiles does not hide


def estimate(problem: Problem, config: AnyConfig, machine: MachineModel) -> Prediction:
    """Latency of a valid CTA-pipelined config, or of one of `baseline_latency.modelled`.

    Sustained clocks, cold weights, floor subtracted. Source: DESIGN 8; parameters from the machine
    model. Some 350 to 650 us of Python.
    """
    if isinstance(config, Baseline):
        latency_us = baseline_us(problem, config, machine)
    else:
        _, latency_us = _clocked(problem, config, machine)
    return predicted(problem, config, latency_us * machine.factor(config), machine)


def predicted(
    problem: Problem, config: AnyConfig, latency_us: float, machine: MachineModel
) -> Prediction:
    """A latency of the estimate with the interval that it has for a config of a problem."""
    doubt = machine.doubt(problem, config, machine.estimate_log_sigma)
    return prediction(latency_us, doubt, ESTIMATE)


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
    works = works_of(problem, config, machine.platform)

    def at(clocks: dict[Works, float]) -> tuple[list[Parts], float]:
        found = {
            gpu: parts_of(gpu, clocks.get(gpu, 1.0), config.pace_us, machine) for gpu in set(works)
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
