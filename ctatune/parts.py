"""What each GPU does of each layer in a call, and how long a tile of that takes: what the estimate
and the simulator begin with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

from ctatune.config import Config
from ctatune.limits import down_stages, resident_ctas
from ctatune.machine_model import L2_SHARE, MachineModel, pace_delay_us
from ctatune.problem import Problem
from ctatune.records import Platform
from ctatune.schedule import DOWN, UP, layer_columns
from ctatune.work import Memory, TileTime, Work

_NONE = Memory(0.0, 0.0, 0.0, 0.0)
_NO_TIME = TileTime(0.0, _NONE, _NONE, 0.0)  # of a GPU that has no tiles of a layer


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


_work = lru_cache(maxsize=1 << 14)(Work)  # many configs share it: those of other mixes and paces


@lru_cache(maxsize=4096)
def works_of(problem: Problem, config: Config, platform: Platform) -> tuple[Works, ...]:
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
                dense=layer == UP,
                sharers=2 if config.pairs(tile) else 1,
                stages=depth,
                kept_bytes=L2_SHARE * platform.l2_bytes,
            )
            for layer, (inputs, columns), tile, depth in zip(
                (UP, DOWN),
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


def parts_of(gpu: Works, clock: float, pace_us: float, machine: MachineModel) -> Parts:
    """CTAs that have no tile of the last wave of `up` begin with `down`: they load what they can
    while they wait for Y1, from the same memory."""
    (up, up_peers), (down, down_peers) = gpu
    of_up, of_down = (machine.tile_time(w, clock) if w.tiles else _NO_TIME for w in (up, down))
    idle, beside = min(-up.tiles % up.ctas, down.tiles), 0.0
    if idle and up.tiles:
        hbm_us = of_down.memory.hbm_us - of_down.memory_ahead.hbm_us
        beside = idle * hbm_us / of_up.memory.hbm_us
    return (
        _part(up, of_up, up_peers, pace_us, machine, beside),
        _part(down, of_down, down_peers, pace_us, machine, 0.0),
    )


def _part(
    work: Work,
    time: TileTime,
    peers: float,
    pace_us: float,
    machine: MachineModel,
    beside: float,
) -> Part:
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
