"""The first estimate: roofline, soft waves and one pipeline recurrence, no tile-by-tile schedule.

The list of a CTA is `up` tiles, then `down` tiles. A GPU is done when its fullest CTA is, or when
the CTAs have worked off what was left to do after the last panel that they had to wait for: the
recurrence finish_w = max(finish_{w-1}, ready_w) + tile, solved in closed form (max-plus). A tile
begins with its own GPU's part of a panel, and needs the rest only when it has summed that.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

from ctatune.baseline_latency import baseline_us
from ctatune.config import AnyConfig, Baseline, Config
from ctatune.limits import resident_ctas
from ctatune.machine_model import MachineModel, Work, faded, pace_delay_us, prediction
from ctatune.problem import Problem
from ctatune.records import Prediction
from ctatune.schedule import layer_columns

ESTIMATE = "estimate-4"
_MAX_PANELS = 8  # looked at; of more, an even selection with the first and the last one
_BURST = 0.5  # part of the last wave's outgoing burst that the spread of its tiles does not hide


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """What one GPU does of one layer in a call."""

    work: Work
    tile_us: float
    link_us: float  # of one tile to all peers that need it
    late_us: float  # how late the last slab of the last CTA's paced tile leaves
    lost_us: float  # what the first burst of tiles to peers takes from the next tile


Parts = tuple[Part, Part]


def estimate(problem: Problem, config: AnyConfig, machine: MachineModel) -> Prediction:
    """Latency of a valid CTA-pipelined config, or of one of `baseline_latency.modelled`.

    Sustained clocks, cold weights, floor subtracted. Source: DESIGN 8; parameters from the machine
    model. Some 100 to 300 us of Python.
    """
    if isinstance(config, Baseline):
        latency_us = baseline_us(problem, config, machine)
    else:
        latency_us = _cta_us(problem, config, machine)
    return predicted(problem, latency_us * machine.factor(config), machine)


def predicted(problem: Problem, latency_us: float, machine: MachineModel) -> Prediction:
    """A latency of the estimate with the interval that it has for a problem."""
    return prediction(latency_us, machine.doubt(problem, machine.estimate_log_sigma), ESTIMATE)


def _cta_us(problem: Problem, config: Config, machine: MachineModel) -> float:
    gpus = Counter(gpu_parts(problem, config, machine))
    panels = _looked_at(problem, config)
    end_us = max(_end_us(gpu, gpus, panels, machine) for gpu in gpus)
    return machine.launch_us + end_us + _tail_us(problem, gpus, machine)


def roofline_us(problem: Problem, machine: MachineModel, gpus: int) -> float:
    """Time that no method on `gpus` GPUs can beat: peak arithmetic, and reading every weight once.

    A measurement below this is a timing fault.
    """
    flops_us = problem.flops / (gpus * machine.peak_tflops) * 1e-6
    return max(flops_us, problem.weight_bytes / (gpus * machine.peak_hbm_gbps) * 1e-3)


def gpu_parts(problem: Problem, config: Config, machine: MachineModel) -> list[Parts]:
    """The parts of both layers on each GPU; GPUs that do the same share the objects."""
    layers = tuple(zip(problem.layers, config.tiles, strict=True))
    up, down = layer_columns(problem, config)
    ctas = config.ctas or resident_ctas(config, machine.platform.sm_count)
    y1_gpus = sum(columns.width > 0 for columns in down)

    @cache
    def parts(up_columns: int, down_columns: int, y2_peers: int) -> Parts:
        up_work, down_work = (
            Work(
                m=problem.m,
                inputs=layer.inputs,
                columns=columns,
                tile=tile,
                ctas=ctas,
                sharers=2 if config.multicast else 1,
            )
            for (layer, tile), columns in zip(layers, (up_columns, down_columns), strict=True)
        )
        clock = machine.clock(machine.busy_us((up_work, down_work)))
        y1_peers = y1_gpus - (down_columns > 0)
        return (
            _part(up_work, y1_peers, clock, config.pace_us, machine),
            _part(down_work, y2_peers, clock, config.pace_us, machine),
        )

    return [
        parts(up[gpu].width, down[gpu].width, sum(to != gpu for to in problem.y2_gpus(gpu)))
        for gpu in range(problem.gpus)
    ]


def _part(work: Work, peers: int, clock: float, pace_us: float, machine: MachineModel) -> Part:
    tile_us = machine.tile_time_us(work, clock)
    return Part(
        work=work,
        tile_us=tile_us,
        link_us=machine.link_us(work.tile_bytes * peers),
        late_us=pace_delay_us(work.tile, pace_us, 1.0),
        lost_us=machine.burst_loss_us(work, peers, pace_us, tile_us),
    )


def _looked_at(problem: Problem, config: Config) -> list[tuple[int, int]]:
    """Panels of `down`, the first and the last among them, with the last of Y1 that each reads."""
    count = -(-problem.m // config.down.m)
    looked = min(count, _MAX_PANELS)
    panels = [i * (count - 1) // max(1, looked - 1) for i in range(looked)]
    last_rows = [min((panel + 1) * config.down.m, problem.m) - 1 for panel in panels]
    return [(panel, row // config.up.m) for panel, row in zip(panels, last_rows, strict=True)]


def _indices(work: Work, panel: int) -> tuple[int, int]:
    """Indices in the grouped raster of the first and the last tile of a panel."""
    group, split = work.tile.group_m, work.tile.split_k
    first_row = panel // group * group
    first = first_row * work.tiles_n + panel - first_row
    last = first + (work.tiles_n - 1) * min(group, work.tiles_m - first_row)
    return first * split, last * split + split - 1


def _computed_us(gpu: Parts, panel: int, machine: MachineModel, *, sent: bool = False) -> float:
    """When a GPU has computed its part of a panel of Y1, and has stored it here or sent it.

    Either the link keeps up, and each wave leaves as a burst or at its pace, or the link has been
    busy since the first wave.
    """
    (up, down), work = gpu, gpu[0].work
    if not work.tiles:
        return 0.0
    _, index = _indices(work, panel)
    waves = _soft((index + 1) / work.ctas, machine)
    computed_us = waves * up.tile_us + up.lost_us * faded(0, waves - 1.0)
    if not sent:
        return computed_us + machine.local_store_us(work.tile_bytes)
    burst_us = (index % work.ctas + 1) * up.link_us
    if index + work.ctas < work.tiles + down.work.tiles:  # not the last tile of its CTA
        burst_us = max(burst_us, up.late_us)
    return max(computed_us + burst_us, up.tile_us + (index + 1) * up.link_us)


def _rest_us(peers: Counter[Parts], panel: int, machine: MachineModel) -> float:
    """When the part of a panel of Y1 that peers compute is there."""
    senders = [peer for peer in peers if peer[0].work.tiles]
    if not senders:
        return 0.0
    sent_us = max(_computed_us(peer, panel, machine, sent=True) for peer in senders)
    first_us = min(up.tile_us for up, _ in senders)
    row_tiles = sum(peers[p] * p[0].work.tiles / p[0].work.tiles_m for p in senders)
    row_in_us = row_tiles * machine.link_us(max(up.work.tile_bytes for up, _ in senders))
    return max(sent_us, first_us + (panel + 1) * row_in_us) + machine.flag_us


def _soft(waves: float, machine: MachineModel) -> float:
    """Waves that count: between a fraction of a wave and whole waves, and at least one."""
    return max(1.0, waves + machine.wave_softness * (math.ceil(waves) - waves))


def _end_us(
    gpu: Parts, gpus: Counter[Parts], panels: list[tuple[int, int]], machine: MachineModel
) -> float:
    """When the last CTA of a GPU has its last tile, and that is stored locally."""
    end_us = _unhindered_us(*gpu, machine)
    up, down = gpu
    if not down.work.tiles:
        return end_us + machine.local_store_us(up.work.tile_bytes)
    peers = gpus - Counter([gpu])
    own_part = up.work.columns / down.work.inputs  # what it can sum before it needs a peer's
    for panel, y1_panel in panels:
        own_us = _computed_us(gpu, y1_panel, machine)
        rest_us = _rest_us(peers, y1_panel, machine) - own_part * down.tile_us
        left = down.work.tiles - _indices(down.work, panel)[0]
        waves = _soft(left / down.work.ctas, machine)
        end_us = max(end_us, max(own_us, rest_us) + waves * down.tile_us)
    return end_us + machine.local_store_us(down.work.tile_bytes)


def _unhindered_us(up: Part, down: Part, machine: MachineModel) -> float:
    """Time of the fullest CTA if no panel had to be waited for, softened towards the mean."""
    ctas, up_tiles = up.work.ctas, up.work.tiles
    tiles = up_tiles + down.work.tiles
    period_us = max(up.tile_us, up.work.active * up.link_us)  # a full link holds the CTAs back
    fullest_us = 0.0
    for cta in {0, up_tiles % ctas, tiles % ctas}:  # one of each kind of CTA
        ups = -(-(up_tiles - cta) // ctas)
        downs = -(-(tiles - cta) // ctas) - ups
        ups_us = up.tile_us + (ups - 1) * period_us if ups > 0 else 0.0
        lost_us = up.lost_us * faded(0, ups if downs else ups - 1)
        lost_us += down.lost_us * faded(ups, downs - 1)
        fullest_us = max(fullest_us, ups_us + lost_us + downs * down.tile_us)
    mean_us = (up_tiles * up.tile_us + down.work.tiles * down.tile_us) / ctas
    return mean_us + machine.wave_softness * (fullest_us - mean_us)


def _tail_us(problem: Problem, gpus: Counter[Parts], machine: MachineModel) -> float:
    """What the transfer of Y2 adds after the last tile: a burst that nothing hides, and a flag."""
    if problem.output == "sharded" or problem.gpus == 1:
        return 0.0
    works = [down.work for _, down in gpus]
    receivers = works if problem.output == "replicated" else works[-1:]
    sent_bytes = sum(gpus[gpu] * gpu[1].work.tiles * gpu[1].work.tile_bytes for gpu in gpus)
    in_us = max(machine.link_us(sent_bytes - work.tiles * work.tile_bytes) for work in receivers)
    workers = [down for _, down in gpus if down.work.tiles]
    link_us = max(in_us, *(down.work.tiles * down.link_us for down in workers))
    compute_us = min(down.work.tiles / down.work.ctas * down.tile_us for down in workers)
    waves = max(1.0, *(work.tiles / work.ctas for work in works))
    return machine.flag_us + max(_BURST * link_us / waves, link_us - compute_us)
