"""The first estimate: roofline, soft waves and one pipeline recurrence, no tile-by-tile schedule.

The list of a CTA is `up` tiles, then `down` tiles. A GPU is done when its fullest CTA is, or when
the CTAs have worked off what was left to do after the last panel that they had to wait for: the
recurrence finish_w = max(finish_{w-1}, ready_w) + tile, solved in closed form (max-plus). A tile
begins with its own GPU's part of a panel, and needs the rest only when it has summed that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ctatune.config import Config, Tile
from ctatune.machine_model import MachineModel, Work, faded, pace_delay_us, prediction
from ctatune.problem import Layer, Problem
from ctatune.records import Prediction, Regime
from ctatune.schedule import DOWN, UP, shares, split_columns

ESTIMATE = "estimate-2"
_MAX_PANELS = 8  # looked at; of more, an even selection with the first and the last one
_BURST = 0.5  # part of the last wave's outgoing burst that the spread of its tiles does not hide


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Gpu:
    """What GPUs with equal shares do in a call.

    `*_link_us` is of one tile to all its peers, `*_lost_us` what the first burst of such tiles
    takes from the next tile.
    """

    count: int  # GPUs with this share
    up: Work
    down: Work
    up_us: float
    down_us: float
    up_link_us: float
    down_link_us: float
    up_lost_us: float
    down_lost_us: float
    own_part: float  # of Y1's columns: what a `down` tile can sum before it needs a peer's
    pace_us: float

    @property
    def up_period_us(self) -> float:
        """From one `up` tile of a CTA to its next: a full link holds the CTAs back."""
        return max(self.up_us, self.up.active * self.up_link_us)


def estimate(problem: Problem, config: Config, machine: MachineModel) -> Prediction:
    """Latency of a valid CTA-pipelined config: sustained clocks, cold weights, floor subtracted.

    Source: DESIGN 8; parameters from the machine model. Some 100 to 300 us of Python.
    """
    kinds = _kinds(problem, config, machine)
    panels = _looked_at(problem, config)
    end_us = max(_end_us(gpu, kinds, panels, machine) for gpu in kinds)
    latency_us = machine.launch_us + end_us + _tail_us(problem, kinds, machine)
    return prediction(latency_us, machine.estimate_log_sigma, ESTIMATE)


def single_us(problem: Problem, machine: MachineModel) -> Prediction:
    """Latency of both layers with cuBLAS on one GPU, whatever `problem.gpus` says."""
    clock = machine.clock(problem.flops / machine.cublas_tflops * 1e-6)
    total_us = 0.0
    for layer in problem.layers:
        compute_us = 2.0 * problem.m * layer.inputs * layer.outputs / machine.cublas_tflops * 1e-6
        elements = layer.inputs * layer.outputs + problem.m * (layer.inputs + layer.outputs)
        hbm_us = 2.0 * elements / machine.hbm_gbps * 1e-3
        total_us += machine.both_us(compute_us / clock, hbm_us) + machine.cublas_launch_us
    return prediction(total_us, machine.estimate_log_sigma, ESTIMATE)


def roofline_us(
    problem: Problem, machine: MachineModel, gpus: int, *, cache: str = Regime().cache
) -> float:
    """Time that no method on `gpus` GPUs can beat: peak arithmetic, and reading every weight once.

    With a `warm` cache as many weights as L2 can hold need not be read. A measurement below this
    is a timing fault.
    """
    in_l2_bytes = gpus * machine.platform.l2_bytes if cache == "warm" else 0
    read_bytes = max(0, problem.weight_bytes - in_l2_bytes)
    flops_us = problem.flops / (gpus * machine.peak_tflops) * 1e-6
    return max(flops_us, read_bytes / (gpus * machine.peak_hbm_gbps) * 1e-3)


def gpu_work(problem: Problem, config: Config, machine: MachineModel) -> list[tuple[Work, Work]]:
    """The parts of both layers on each GPU; GPUs with equal parts share the objects."""
    ctas = config.ctas or machine.platform.sm_count
    parts = [
        split_columns(layer.outputs, tile.n, shares(stage, config, problem.gpus))
        for stage, layer, tile in _layers(problem, config)
    ]
    known: dict[tuple[int, int], Work] = {}
    for stage, layer, tile in _layers(problem, config):
        for columns in {part.width for part in parts[stage]}:
            known[stage, columns] = Work(
                m=problem.m, inputs=layer.inputs, columns=columns, tile=tile, ctas=ctas
            )
    return [(known[UP, up.width], known[DOWN, down.width]) for up, down in zip(*parts, strict=True)]


def _layers(problem: Problem, config: Config) -> Iterator[tuple[int, Layer, Tile]]:
    return zip((UP, DOWN), problem.layers, (config.up, config.down), strict=True)


def _kinds(problem: Problem, config: Config, machine: MachineModel) -> list[_Gpu]:
    """The GPUs of a call, those with equal shares and equally many peers only once."""
    works = gpu_work(problem, config, machine)
    y1_gpus = sum(down.tiles > 0 for _, down in works)
    counts: Counter[tuple[int, int, int]] = Counter()
    example: dict[tuple[int, int, int], tuple[Work, Work]] = {}
    for g, (up, down) in enumerate(works):
        to_last = int(g != problem.gpus - 1)
        y2_peers = {"replicated": problem.gpus - 1, "sharded": 0, "last": to_last}[problem.output]
        key = (up.columns, down.columns, y2_peers)
        counts[key] += 1
        example[key] = (up, down)
    kinds: list[_Gpu] = []
    for key, (up, down) in example.items():
        clock = machine.clock(machine.busy_us((up, down)))
        up_us, down_us = (machine.tile_time_us(work, clock) for work in (up, down))
        y1_peers, pace_us = y1_gpus - (down.tiles > 0), config.pace_us
        kinds.append(
            _Gpu(
                count=counts[key],
                up=up,
                down=down,
                up_us=up_us,
                down_us=down_us,
                up_link_us=machine.link_us(up.tile_bytes * y1_peers),
                down_link_us=machine.link_us(down.tile_bytes * key[2]),
                up_lost_us=machine.burst_loss_us(up, y1_peers, pace_us, up_us),
                down_lost_us=machine.burst_loss_us(down, key[2], pace_us, down_us),
                own_part=up.columns / problem.h,
                pace_us=pace_us,
            )
        )
    return kinds


def _looked_at(problem: Problem, config: Config) -> list[tuple[int, int]]:
    """Panels of `down`, the first and the last among them, with the last of Y1 that each reads."""
    count = -(-problem.m // config.down.m)
    looked = min(count, _MAX_PANELS)
    panels = [i * (count - 1) // max(1, looked - 1) for i in range(looked)]
    last_rows = [min((panel + 1) * config.down.m, problem.m) - 1 for panel in panels]
    return [(panel, row // config.up.m) for panel, row in zip(panels, last_rows, strict=True)]


def _index_of(work: Work, panel: int, *, last: bool) -> int:
    """Index in the grouped raster of the first or the last tile of a panel."""
    group = work.tile.group_m
    first_row = panel // group * group
    index = first_row * work.tiles_n + panel - first_row
    if last:
        index += (work.tiles_n - 1) * min(group, work.tiles_m - first_row)
    return index


def _computed_us(gpu: _Gpu, panel: int, machine: MachineModel, *, sent: bool = False) -> float:
    """When a GPU has computed its part of a panel of Y1, and has stored it here or sent it.

    Either the link keeps up, and each wave leaves as a burst or at its pace, or the link has been
    busy since the first wave.
    """
    if not gpu.up.tiles:
        return 0.0
    index = _index_of(gpu.up, panel, last=True)
    waves = _soft((index + 1) / gpu.up.ctas, machine)
    computed_us = waves * gpu.up_us + gpu.up_lost_us * faded(0, waves - 1.0)
    if not sent:
        return computed_us + machine.local_store_us(gpu.up.tile_bytes)
    burst_us = (index % gpu.up.ctas + 1) * gpu.up_link_us
    if index + gpu.up.ctas < gpu.up.tiles + gpu.down.tiles:  # not the last tile of its CTA
        burst_us = max(burst_us, pace_delay_us(gpu.up.tile, gpu.pace_us, 1.0))
    return max(computed_us + burst_us, gpu.up_us + (index + 1) * gpu.up_link_us)


def _rest_us(gpu: _Gpu, kinds: list[_Gpu], panel: int, machine: MachineModel) -> float:
    """When the part of a panel of Y1 that peers compute is there."""
    senders = [kind for kind in kinds if kind.up.tiles and (kind is not gpu or kind.count > 1)]
    if not senders:
        return 0.0
    sent_us = max(_computed_us(kind, panel, machine, sent=True) for kind in senders)
    first_us = min(kind.up_us for kind in senders)
    row_tiles = sum((kind.count - (kind is gpu)) * kind.up.tiles_n for kind in senders)
    row_in_us = row_tiles * machine.link_us(max(kind.up.tile_bytes for kind in senders))
    return max(sent_us, first_us + (panel + 1) * row_in_us) + machine.flag_us


def _soft(waves: float, machine: MachineModel) -> float:
    """Waves that count: between a fraction of a wave and whole waves, and at least one."""
    return max(1.0, waves + machine.wave_softness * (math.ceil(waves) - waves))


def _end_us(
    gpu: _Gpu, kinds: list[_Gpu], panels: list[tuple[int, int]], machine: MachineModel
) -> float:
    """When the last CTA of a GPU has its last tile, and that is stored locally."""
    end_us = _unhindered_us(gpu, machine)
    down = gpu.down
    if down.tiles:
        for panel, y1_panel in panels:
            own_us = _computed_us(gpu, y1_panel, machine)
            rest_us = _rest_us(gpu, kinds, y1_panel, machine) - gpu.own_part * gpu.down_us
            left = down.tiles - _index_of(down, panel, last=False)
            waves = _soft(left / down.ctas, machine)
            end_us = max(end_us, max(own_us, rest_us) + waves * gpu.down_us)
    return end_us + machine.local_store_us((down if down.tiles else gpu.up).tile_bytes)


def _unhindered_us(gpu: _Gpu, machine: MachineModel) -> float:
    """Time of the fullest CTA if no panel had to be waited for, softened towards the mean."""
    ctas, up_tiles = gpu.up.ctas, gpu.up.tiles
    tiles = up_tiles + gpu.down.tiles
    fullest_us = 0.0
    for cta in {0, up_tiles % ctas, tiles % ctas}:  # one of each kind of CTA
        ups = -(-(up_tiles - cta) // ctas)
        downs = -(-(tiles - cta) // ctas) - ups
        ups_us = gpu.up_us + (ups - 1) * gpu.up_period_us if ups > 0 else 0.0
        lost_us = gpu.up_lost_us * faded(0, ups if downs else ups - 1)
        lost_us += gpu.down_lost_us * faded(ups, downs - 1)
        fullest_us = max(fullest_us, ups_us + lost_us + downs * gpu.down_us)
    mean_us = (up_tiles * gpu.up_us + gpu.down.tiles * gpu.down_us) / ctas
    return mean_us + machine.wave_softness * (fullest_us - mean_us)


def _tail_us(problem: Problem, kinds: list[_Gpu], machine: MachineModel) -> float:
    """What the transfer of Y2 adds after the last tile: a burst that nothing hides, and a flag."""
    if problem.output == "sharded" or problem.gpus == 1:
        return 0.0
    workers = [kind for kind in kinds if kind.down.tiles]
    receivers = kinds if problem.output == "replicated" else kinds[-1:]
    compute_us = min(kind.down.tiles / kind.down.ctas * kind.down_us for kind in workers)
    waves = max(1.0, *(kind.down.tiles / kind.down.ctas for kind in workers))
    out_us = max(kind.down.tiles * kind.down_link_us for kind in workers)
    sent_bytes = sum(kind.count * kind.down.tiles * kind.down.tile_bytes for kind in workers)
    in_us = max(
        machine.link_us(sent_bytes - kind.down.tiles * kind.down.tile_bytes) for kind in receivers
    )
    link_us = max(out_us, in_us)
    return machine.flag_us + max(_BURST * link_us / waves, link_us - compute_us)
