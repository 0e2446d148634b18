"""What a config means for a problem: for each GPU the ordered list of tiles, and who needs what.

The kernel, the simulator and the NumPy reference all execute this same list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctatune.config import Config, Tile
from ctatune.problem import Problem

UP, DOWN = 0, 1
NOTHING = 2  # instead of a layer: a slot without a tile


class Columns(NamedTuple):
    """Output features [start, stop) of one layer that lie on one GPU; empty when equal."""

    start: int
    stop: int

    @property
    def width(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The tiles of every GPU in the order in which its CTAs take them.

    `tiles[g]` is an int32 array of rows (layer, first row, first row in the local weight, first
    column, segment); CTA c of C takes rows c, c + C, ... . `segments` divide the columns of Y1 by
    the GPU that computes them. An `up` tile lies in its segment; a `down` tile sums over all of
    them in a circle that begins with its segment (that of its own GPU, which is there first), and
    waits in each panel that covers its rows for `segment_tiles` arrivals of each segment.
    `y1_gpus` receive every tile of Y1; `y2_gpus[g]` receive the Y2 tiles that GPU g computes.
    """

    problem: Problem
    config: Config
    columns: tuple[tuple[Columns, ...], tuple[Columns, ...]]
    tiles: tuple[NDArray[np.int32], ...]
    y1_gpus: tuple[int, ...]
    y2_gpus: tuple[tuple[int, ...], ...]
    panels: int
    segments: tuple[Columns, ...]

    @property
    def segment_tiles(self) -> tuple[int, ...]:
        """Tiles of each segment in one panel."""
        return tuple(-(-segment.width // self.config.up.n) for segment in self.segments)

    def circle(self, segment: int) -> tuple[int, ...]:
        """The order in which a `down` tile with this first segment sums over the segments."""
        return tuple((segment + i) % len(self.segments) for i in range(len(self.segments)))

    def panels_of(self, row: int) -> range:
        """Panels of Y1 that a `down` tile starting at `row` reads."""
        last = min(row + self.config.down.m, self.problem.m) - 1
        return range(row // self.config.up.m, last // self.config.up.m + 1)

    @property
    def segment_arrivals(self) -> tuple[int, ...]:
        """What the counter of each segment of a panel gains in a call: one for each part."""
        return tuple(count * self.config.up.split_k for count in self.segment_tiles)

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


def layer_columns(problem: Problem, config: Config) -> tuple[tuple[Columns, ...], ...]:
    """The columns of each layer that each GPU computes."""
    layers = zip(problem.layers, config.tiles, strict=True)
    return tuple(
        split_columns(layer.outputs, tile.n, shares(stage, config, problem.gpus))
        for stage, (layer, tile) in enumerate(layers)
    )


def raster(layer: int, m: int, columns: Columns, tile: Tile, segment: int) -> NDArray[np.int32]:
    """Grouped raster: `group_m` tile rows at a time, column by column inside the group."""
    rows = np.arange(0, m, tile.m)
    cols = np.arange(columns.start, columns.stop, tile.n)
    order = [
        (layer, row, col - columns.start, col, segment)
        for first in range(0, len(rows), tile.group_m)
        for col in cols
        for row in rows[first : first + tile.group_m]
    ]
    return np.array(order, dtype=np.int32).reshape(-1, 5)


def slots(tiles: NDArray[np.int32], config: Config) -> NDArray[np.int32]:
    """Rows of (tile, part) for CTAs in clusters, of all `up` tiles and then of all `down` tiles.

    The CTAs of a cluster are neighbours. A split tile fills `split_k` slots, one a part; rows of
    NOTHING fill the last cluster of a layer.
    """
    rows = []
    for layer, tile in enumerate(config.tiles):
        own = np.repeat(tiles[tiles[:, 0] == layer], tile.split_k, axis=0)
        part = np.arange(len(own), dtype=np.int32) % tile.split_k
        padding = np.full((-len(own) % config.cluster, 6), (NOTHING, 0, 0, 0, 0, 0), np.int32)
        rows += [np.column_stack([own, part]), padding]
    return np.concatenate(rows).astype(np.int32)


def build(problem: Problem, config: Config) -> Schedule:
    """The schedule of a valid config (`limits.why_invalid` is None) for a problem."""
    up, down = layer_columns(problem, config)
    everyone = range(problem.gpus)
    workers = [gpu for gpu in everyone if up[gpu].width]
    first = [workers.index(gpu) if gpu in workers else 0 for gpu in everyone]
    tiles = tuple(
        np.concatenate(
            [
                raster(UP, problem.m, up[gpu], config.up, first[gpu]),
                raster(DOWN, problem.m, down[gpu], config.down, first[gpu]),
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
    tiles = tiles[np.argsort(tiles[:, 0], kind="stable")]  # every `up` tile before any `down` tile
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
