"""What a config means for a problem: for each GPU the ordered list of tiles, and who needs what.

The kernel, the simulator and the NumPy reference all execute this same list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctatune.config import Config, DownAxis, Tile
from ctatune.layout import pitch
from ctatune.limits import TILE_K
from ctatune.problem import Problem

UP, DOWN = 0, 1
PARTIAL = 2  # a `down` tile of the owner, summed over another GPU's segment for it
NOTHING = 3  # instead of a layer: a slot without a tile


class Columns(NamedTuple):
    """Output features [start, stop) of one layer that lie on one GPU; empty when equal."""

    start: int
    stop: int

    @property
    def width(self) -> int:
        return self.stop - self.start


Division = tuple[tuple[Columns, ...], ...]  # of up and of down: the columns of each GPU


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The tiles of every GPU in the order in which its CTAs take them.

    `tiles[g]` is an int32 array of rows (layer, first row, first row in the local weight, first
    column, segment); CTA c of C takes rows c, c + C, ... . `segments` divide the columns of Y1 by
    the GPU that computes them. An `up` tile lies in its segment; a `down` tile sums over all of
    them in a circle that begins with its segment (that of its own GPU, which is there first), and
    waits in each panel that covers its rows for `segment_arrivals` of each segment.
    `y1_gpus` receive every tile of Y1; `y2_gpus[g]` receive the Y2 tiles that GPU g computes.

    With `down_axis` h Y1 stays where it is computed. GPU g sums all tiles of Y2 over its segment
    alone: those of `columns[DOWN]` of others first, as PARTIAL tiles in bf16, which their owners
    receive and add, in the order of the circle, to the DOWN tiles that they sum themselves.
    """

    problem: Problem
    config: Config
    columns: Division
    tiles: tuple[NDArray[np.int32], ...]
    y1_gpus: tuple[int, ...]
    y2_gpus: tuple[tuple[int, ...], ...]
    panels: int
    segments: tuple[Columns, ...]

    @property
    def reduces(self) -> bool:
        """Whether Y2 is summed over GPUs."""
        return self.config.down_axis == "h"

    @property
    def y1_width(self) -> int:
        """Columns of a row of Y1 in memory. Tiles of `up` write zeros from h on: to the `pitch`, or
        where Y2 is summed over GPUs to the end of a tile; then come partial sums in whole tiles."""
        if not self.reduces:
            return pitch(self.problem.h)
        return self._partial_start + len(self.segments) * self.partial_width

    @property
    def _partial_start(self) -> int:
        return _whole(self.problem.h, self.config.up.n)

    @property
    def partial_width(self) -> int:
        """Columns of Y1 between the partial sums over one segment and those over the next."""
        return _whole(max(own.width for own in self.columns[DOWN]), self.config.down.n)

    def partial_column(self, gpu: int) -> int:
        """Where in Y1 on `gpu` column 0 of Y2 would lie, of the partial sums over segment 0."""
        return self._partial_start - self.columns[DOWN][gpu].start

    def w_down_held(self, gpu: int) -> tuple[Columns, Columns]:
        """Rows and columns of W_down that a GPU holds."""
        return w_down_held(self.problem, self.columns, self.config.down_axis, gpu)

    def tile_of(self, layer: int) -> Tile:
        """The tile of a layer."""
        return self.config.up if layer == UP else self.config.down

    def y1_receivers(self, gpu: int) -> tuple[int, ...]:
        """GPUs that receive the Y1 tiles that `gpu` computes."""
        return (gpu,) if self.reduces else self.y1_gpus

    def owner(self, column: int) -> int:
        """The GPU whose part of Y2 holds a column."""
        return next(g for g, own in enumerate(self.columns[DOWN]) if column < own.stop)

    def awaits(self, layer: int, segment: int) -> tuple[int, ...]:
        """Counters of a panel that a tile with this (first) segment waits for, as it sums: those of
        segments, and behind them, where Y2 is summed over GPUs, of partial sums over each."""
        if layer != DOWN:
            return (segment,) if layer == PARTIAL else ()
        count = len(self.segments)
        circle = tuple((segment + i) % count for i in range(count))
        return (segment, *(count + i for i in circle[1:])) if self.reduces else circle

    def delivers(
        self, gpu: int, layer: int, column: int, segment: int
    ) -> tuple[tuple[int, ...], int | None]:
        """GPUs that receive a tile which `gpu` computes, and their counter for it (Y2 has none)."""
        if layer == DOWN:
            return self.y2_gpus[gpu], None
        if layer == PARTIAL:
            return (self.owner(column),), len(self.segments) + segment
        return self.y1_receivers(gpu), segment

    def panels_of(self, row: int) -> range:
        """Panels of Y1 that a `down` tile starting at `row` reads."""
        last = min(row + self.config.down.m, self.problem.m) - 1
        return range(row // self.config.up.m, last // self.config.up.m + 1)

    @property
    def segment_arrivals(self) -> tuple[int, ...]:
        """What the counter of each segment of a panel gains in a call: one for each part of a tile
        of `up`."""
        up = self.config.up
        return tuple(-(-segment.width // up.n) * up.split_k for segment in self.segments)

    def arrivals(self, gpu: int) -> tuple[int, ...]:
        """What each counter of a panel on `gpu` gains in a call: those of the segments and, where
        Y2 is summed over GPUs, of the partial sums over each."""
        if not self.reduces:
            return self.segment_arrivals
        own, tiles = self.columns[DOWN][gpu], np.concatenate(self.tiles)
        first_row = tiles[(tiles[:, 0] == PARTIAL) & (tiles[:, 1] == 0)]
        here = first_row[(own.start <= first_row[:, 3]) & (first_row[:, 3] < own.stop), 4]
        counts = np.bincount(here, minlength=len(self.segments)) * self.config.down.split_k
        return (*self.segment_arrivals, *map(int, counts))

    def slots(self, gpu: int) -> NDArray[np.int32]:
        """What the CTAs of a GPU take: CTA c of C takes rows c, c + C, ... of `slots`."""
        return slots(self.tiles[gpu], self.config)

    def promised(self) -> list[tuple[int, Columns]]:
        """Which columns of Y2 must lie on which GPU after a call."""
        if self.problem.output == "sharded":
            return [(gpu, own) for gpu, own in enumerate(self.columns[DOWN]) if own.width]
        return [(gpu, Columns(0, self.problem.n)) for gpu in self.problem.y2_gpus(0)]

    def senders(self, gpu: int) -> tuple[int, ...]:
        """Peers that store tiles of Y2 into `gpu`."""
        return tuple(g for g, to in enumerate(self.y2_gpus) if gpu in to and g != gpu)


def _whole(width: int, tile_n: int) -> int:
    return -(-width // tile_n) * tile_n


def shares(stage: int, config: Config, gpus: int) -> list[float]:
    """Part of a stage's columns on each GPU: `(1 - mix) [g in stage] / p + mix / P`."""
    p_up, p_down = config.stage_split
    members = range(p_up) if stage == UP else range(gpus - p_down, gpus)
    even = config.mix / gpus
    return [
        even + ((1.0 - config.mix) / len(members) if gpu in members else 0.0) for gpu in range(gpus)
    ]


def split_columns(count: int, tile_n: int, parts: list[float]) -> tuple[Columns, ...]:
    """Divide `count` columns in whole tiles so that running sums are as near `parts` as can be."""
    tiles = -(-count // tile_n)
    edges = [0, *(round(tiles * float(edge)) for edge in np.cumsum(parts))]
    edges[-1] = tiles
    return tuple(
        Columns(min(start * tile_n, count), min(stop * tile_n, count))
        for start, stop in pairwise(edges)
    )


def layer_columns(problem: Problem, config: Config) -> Division:
    """The columns of each layer that each GPU computes."""
    units = math.lcm(config.up.n, TILE_K), config.down.n  # segments of Y1 begin with K blocks
    return tuple(
        split_columns(layer.outputs, units[stage], shares(stage, config, problem.gpus))
        for stage, layer in enumerate(problem.layers)
    )


def w_down_held(
    problem: Problem, columns: Division, axis: DownAxis, gpu: int
) -> tuple[Columns, Columns]:
    """Rows and columns of W_down that a GPU holds, by the axis along which `down` is divided."""
    if axis == "n":
        return columns[DOWN][gpu], Columns(0, problem.h)
    return Columns(0, problem.n), columns[UP][gpu]


def _peers(gpu: int, gpus: int) -> list[int]:
    """The other GPUs in the order in which they wait for this one: the one before it first, whose
    circle comes to this one's segment next."""
    return [(gpu - i) % gpus for i in range(1, gpus)]


def raster(
    layer: int, m: int, columns: Columns, tile: Tile, segment: int, held_from: int
) -> NDArray[np.int32]:
    """Grouped raster: `group_m` tile rows at a time, column by column inside the group. The weight
    here begins with the row of column `held_from`."""
    rows = np.arange(0, m, tile.m)
    cols = np.arange(columns.start, columns.stop, tile.n)
    order = [
        (layer, row, col - held_from, col, segment)
        for first in range(0, len(rows), tile.group_m)
        for col in cols
        for row in rows[first : first + tile.group_m]
    ]
    return np.array(order, dtype=np.int32).reshape(-1, 5)


def slots(tiles: NDArray[np.int32], config: Config) -> NDArray[np.int32]:
    """Rows of (tile, part) for CTAs in clusters: `up` tiles, partial sums, then `down` tiles.

    The CTAs of a cluster are neighbours. A split tile fills `split_k` slots, one a part; rows of
    NOTHING fill the last cluster of a layer.
    """
    rows = []
    for layer, tile in ((UP, config.up), (PARTIAL, config.down), (DOWN, config.down)):
        own = np.repeat(tiles[tiles[:, 0] == layer], tile.split_k, axis=0)
        part = np.arange(len(own), dtype=np.int32) % tile.split_k
        padding = np.full((-len(own) % config.cluster, 6), (NOTHING, 0, 0, 0, 0, 0), np.int32)
        rows += [np.column_stack([own, part]), padding]
    return np.concatenate(rows).astype(np.int32)


def build(problem: Problem, config: Config, columns: Division | None = None) -> Schedule:
    """The schedule of a valid config (`limits.why_invalid` is None) for a problem.

    `columns` of both layers replace those of the config, where weights lie divided already: all
    their edges but the last are multiples of the tile widths.
    """
    up, down = columns or layer_columns(problem, config)
    everyone, m = range(problem.gpus), problem.m
    reduces = config.down_axis == "h"
    workers = [gpu for gpu in everyone if up[gpu].width]
    first = [workers.index(gpu) if gpu in workers else 0 for gpu in everyone]
    tiles = tuple(
        np.concatenate(
            [
                raster(UP, m, up[gpu], config.up, first[gpu], up[gpu].start),
                *(
                    raster(PARTIAL, m, down[to], config.down, first[gpu], 0)
                    for to in _peers(gpu, problem.gpus)
                    if reduces
                ),
                raster(
                    DOWN, m, down[gpu], config.down, first[gpu], 0 if reduces else down[gpu].start
                ),
            ]
        )
        for gpu in everyone
    )
    return Schedule(
        problem=problem,
        config=config,
        columns=(up, down),
        tiles=tiles,
        y1_gpus=tuple(gpu for gpu in everyone if down[gpu].width),
        y2_gpus=tuple(problem.y2_gpus(gpu) if down[gpu].width else () for gpu in everyone),
        panels=-(-problem.m // config.up.m),
        segments=tuple(up[gpu] for gpu in workers),
    )


def alone(schedule: Schedule) -> Schedule:
    """The same tiles, each with the same order of sums, all on one GPU: equal bit for bit."""
    problem = replace(schedule.problem, gpus=1, output="replicated")
    config = replace(schedule.config, mix=1.0, stage_split=(1, 0))
    tiles = np.concatenate(schedule.tiles)
    order = np.array([0, 2, 1])  # every `up` tile before any partial sum, these before `down`
    tiles = tiles[np.argsort(order[tiles[:, 0]], kind="stable")]
    tiles[:, 2] = tiles[:, 3]  # all rows of each weight are here
    return replace(
        schedule,
        problem=problem,
        config=config,
        columns=((Columns(0, problem.h),), (Columns(0, problem.n),)),
        tiles=(tiles,),
        y1_gpus=(0,),
        y2_gpus=((0,),),
    )
