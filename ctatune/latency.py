"""The first estimate: roofline, soft waves and one pipeline recurrence, no tile-by-tile schedule.

The list of a CTA is `up` tiles, then `down` tiles. A GPU is done when its fullest CTA is, or when
the CTAs have worked off what was left to do after the last panel that they had to wait for: the
recurrence finish_w = max(finish_{w-1}, ready_w) + tile, solved in closed form (max-plus).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ctatune.config import Config, Tile
from ctatune.machine_model import MachineModel, Work, prediction
from ctatune.problem import Layer, Problem
from ctatune.records import Prediction, Regime
from ctatune.schedule import DOWN, UP, shares, split_columns

ESTIMATE = "estimate-1"
_MAX_PANELS = 8  # looked at; of more, an even selection with the first and the last one
_BURST = 0.5  # part of the last wave's outgoing burst that the spread of its tiles does not hide


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Gpu:
    """What GPUs with equal shares do in a call; `*_link_us` is of one tile to all its peers."""

    count: int  # GPUs with this share
    up: Work
    down: Work
    up_us: float
    down_us: float
    up_link_us: float
    down_link_us: float

    @property
    def up_period_us(self) -> float:
        """From one `up` tile of a CTA to its next: a full link holds the CTAs back."""
        return max(self.up_us, self.up.active * self.up_link_us)


def estimate(problem: Problem, config: Config, machine: MachineModel) -> Prediction:
    """Latency of a valid CTA-pipelined config: sustained clocks, cold weights, floor subtracted.

    Source: DESIGN 8; parameters from the machine model. Some 100 to 300 us of Python.
    """
    kinds = _kinds(problem, config, machine)
    panels = _looked_at(-(-problem.m // config.down.m))
    last_rows = [min((panel + 1) * config.down.m, problem.m) - 1 for panel in panels]
    y1_panels = [row // config.up.m for row in last_rows]
    computed_us = [_computed_us(kinds, panel, machine) for panel in y1_panels]
    first_us = min(gpu.up_us for gpu in kinds if gpu.up.tiles)
    end_us = 0.0
    for gpu in kinds:
        row_in_us = _row_in_us(gpu, kinds, machine)
        ready_us = [
            max(sent_us, first_us + (panel + 1) * row_in_us) + machine.flag_us
            for panel, sent_us in zip(y1_panels, computed_us, strict=True)
        ]
        end_us = max(end_us, _end_us(gpu, panels, ready_us, machine))
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
        y1_peers = y1_gpus - (down.tiles > 0)
        kinds.append(
            _Gpu(
                count=counts[key],
                up=up,
                down=down,
                up_us=machine.tile_time_us(up, clock),
                down_us=machine.tile_time_us(down, clock),
                up_link_us=machine.link_us(up.tile_bytes * y1_peers),
                down_link_us=machine.link_us(down.tile_bytes * key[2]),
            )
        )
    return kinds


def _looked_at(panels: int) -> list[int]:
    """The `down` panels that the recurrence looks at, the first and the last among them."""
    if panels <= _MAX_PANELS:
        return list(range(panels))
    return [i * (panels - 1) // (_MAX_PANELS - 1) for i in range(_MAX_PANELS)]


def _index_of(work: Work, panel: int, *, last: bool) -> int:
    """Index in the grouped raster of the first or the last tile of a panel."""
    group = work.tile.group_m
    first_row = panel // group * group
    index = first_row * work.tiles_n + panel - first_row
    if last:
        index += (work.tiles_n - 1) * min(group, work.tiles_m - first_row)
    return index


def _computed_us(kinds: list[_Gpu], panel: int, machine: MachineModel) -> float:
    """When all GPUs have computed a panel of Y1 and sent it off.

    Either the link keeps up, and each wave leaves as a burst, or the link has been busy since the
    first wave.
    """
    latest_us = 0.0
    for gpu in kinds:
        if not gpu.up.tiles:
            continue
        index = _index_of(gpu.up, panel, last=True)
        waves = _soft((index + 1) / gpu.up.ctas, machine)
        burst_us = (index % gpu.up.ctas + 1) * gpu.up_link_us
        linked_us = gpu.up_us + (index + 1) * gpu.up_link_us
        sent_us = max(waves * gpu.up_us + burst_us, linked_us)
        latest_us = max(latest_us, sent_us + machine.local_store_us(gpu.up.tile_bytes))
    return latest_us


def _row_in_us(gpu: _Gpu, kinds: list[_Gpu], machine: MachineModel) -> float:
    """Time in which the tiles of one panel of Y1 that peers compute come in through the port."""
    workers = [kind for kind in kinds if kind.up.tiles]
    columns = sum(kind.count * kind.up.tiles_n for kind in workers) - gpu.up.tiles_n
    return columns * machine.link_us(max(kind.up.tile_bytes for kind in workers))


def _soft(waves: float, machine: MachineModel) -> float:
    """Waves that count: between a fraction of a wave and whole waves, and at least one."""
    return max(1.0, waves + machine.wave_softness * (math.ceil(waves) - waves))


def _end_us(gpu: _Gpu, panels: list[int], ready_us: list[float], machine: MachineModel) -> float:
    """When the last CTA of a GPU has its last tile, and that is stored locally."""
    end_us = _unhindered_us(gpu, machine)
    down = gpu.down
    if down.tiles:
        for panel, ready in zip(panels, ready_us, strict=True):
            left = down.tiles - _index_of(down, panel, last=False)
            end_us = max(end_us, ready + _soft(left / down.ctas, machine) * gpu.down_us)
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
        fullest_us = max(fullest_us, ups_us + downs * gpu.down_us)
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
