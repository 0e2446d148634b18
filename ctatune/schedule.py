"""What a config means for a problem: for each GPU the ordered list of tiles, and who needs what.

The kernel, the simulator and the NumPy reference all execute this same list.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctatune.config import Config, Tile
from ctatune.problem import Problem

UP, DOWN = 0, 1


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
    column); CTA c of C takes rows c, c + C, ... . A `down` tile waits for the panels of Y1 that
    cover its rows: `tiles_per_panel` arrivals for each panel. `y1_gpus` receive every tile of Y1;
    `y2_gpus[g]` receive the Y2 tiles that GPU g computes.
    """

    problem: Problem
    config: Config
    columns: tuple[tuple[Columns, ...], tuple[Columns, ...]]
    tiles: tuple[NDArray[np.int32], ...]
    y1_gpus: tuple[int, ...]
    y2_gpus: tuple[tuple[int, ...], ...]
    panels: int
    tiles_per_panel: int

    def panels_of(self, row: int) -> range:
        """Panels of Y1 that a `down` tile starting at `row` reads."""
        last = min(row + self.config.down.m, self.problem.m) - 1
        return range(row // self.config.up.m, last // self.config.up.m + 1)

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


def raster(layer: int, m: int, columns: Columns, tile: Tile) -> NDArray[np.int32]:
    """Grouped raster: `group_m` tile rows at a time, column by column inside the group."""
    rows = np.arange(0, m, tile.m)
    cols = np.arange(columns.start, columns.stop, tile.n)
    order = [
        (layer, row, col - columns.start, col)
        for first in range(0, len(rows), tile.group_m)
        for col in cols
        for row in rows[first : first + tile.group_m]
    ]
    return np.array(order, dtype=np.int32).reshape(-1, 4)


def build(problem: Problem, config: Config) -> Schedule:
    """The schedule of a valid config (`space.why_invalid` is None) for a problem."""
    layers = zip(problem.layers, (config.up, config.down), strict=True)
    columns = tuple(
        split_columns(layer.outputs, tile.n, shares(stage, config, problem.gpus))
        for stage, (layer, tile) in enumerate(layers)
    )
    tiles = tuple(
        np.concatenate(
            [
                raster(UP, problem.m, columns[UP][gpu], config.up),
                raster(DOWN, problem.m, columns[DOWN][gpu], config.down),
            ]
        )
        for gpu in range(problem.gpus)
    )
    return Schedule(
        problem=problem,
        config=config,
        columns=(columns[0], columns[1]),
        tiles=tiles,
        y1_gpus=tuple(g for g in range(problem.gpus) if columns[DOWN][g].width),
        y2_gpus=tuple(_y2_gpus(problem, g, columns[DOWN][g]) for g in range(problem.gpus)),
        panels=-(-problem.m // config.up.m),
        tiles_per_panel=-(-problem.h // config.up.n),
    )


def _y2_gpus(problem: Problem, gpu: int, owned: Columns) -> tuple[int, ...]:
    if not owned.width:
        return ()
    everyone = tuple(range(problem.gpus))
    return {"replicated": everyone, "sharded": (gpu,), "last": everyone[-1:]}[problem.output]
