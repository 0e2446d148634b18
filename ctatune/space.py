"""The search space: families of configs, what is tried for a problem, and against whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from ctatune.config import Baseline, Config, DownAxis, Tile
from ctatune.limits import (
    BARRIER_BYTES,
    MIN_STAGES,
    SMEM_BYTES,
    SWAPPED_ROWS,
    WGMMA_ROWS,
    default_split,
    down_stages,
    smem_bytes,
    stage_bytes,
    why_invalid,
)
from ctatune.problem import DTYPES, Problem


class Family(NamedTuple):
    """The tile of both layers and how operands come and results go; the ring is as deep as fits.

    Tiles of `down` are `down_n` columns wide where that is not 0, which asks for the same width.
    """

    m: int
    n: int
    d_slabs: int
    split_k: int = 1
    multicast: bool = False
    direct: bool = False
    down_n: int = 0

    def config(self, *, up_group: int = 1, down_group: int = 1, **rest: Any) -> Config:
        """A config of this family, with the deepest ring that fits into shared memory."""
        up = Tile(m=self.m, n=self.n, group_m=up_group, split_k=self.split_k)
        down = replace(up, n=self.down_n or self.n, group_m=down_group)
        kind = {name: getattr(self, name) for name in ("d_slabs", "multicast", "direct")}
        return _deepest(Config(up=up, down=down, **kind, **rest, stages=MIN_STAGES))


def _deepest(config: Config) -> Config:
    """A config of MIN_STAGES with the deepest ring instead that fits into shared memory."""
    stage = stage_bytes(config.up) + 2 * BARRIER_BYTES
    more = (SMEM_BYTES - smem_bytes(config)) // stage
    return replace(config, stages=MIN_STAGES + max(0, more))


# Few tokens: all SMs stream weights, so tiles are narrow and split along K. Then ever larger tiles,
# with room in the slabs for a whole tile (a paced store holds nothing up) or for half of it and
# one more stage; last those for layers of which one is much wider than the other.
FAMILIES = (
    Family(16, 64, 2, split_k=2, direct=True),
    Family(32, 64, 2, split_k=2, direct=True),
    Family(64, 64, 2, split_k=2, direct=True),
    Family(64, 64, 2, direct=True),
    Family(16, 128, 2, split_k=2, direct=True),
    Family(64, 128, 2, split_k=2, direct=True),
    Family(64, 64, 1, split_k=2),
    Family(64, 128, 2),
    Family(64, 256, 3),
    Family(128, 64, 2, split_k=2, direct=True),
    Family(128, 64, 1, split_k=2),
    Family(128, 64, 2, multicast=True, direct=True),
    Family(128, 128, 2, split_k=2),
    Family(128, 128, 2),
    Family(128, 128, 2, multicast=True),
    Family(128, 128, 2, multicast=True, direct=True),
    Family(128, 192, 3),
    Family(128, 192, 3, multicast=True),
    Family(128, 256, 4),
    Family(128, 256, 4, multicast=True),
    Family(128, 256, 2),
    Family(256, 128, 2, multicast=True),
    Family(128, 128, 4, multicast=True, down_n=256),
    Family(128, 192, 4, multicast=True, down_n=256),
    Family(128, 192, 3, multicast=True, down_n=128),
    Family(128, 256, 4, multicast=True, down_n=128),
    Family(128, 224, 3, multicast=True, down_n=256),
    Family(128, 224, 6, multicast=True, down_n=160),
    Family(128, 224, 4, multicast=True, down_n=128),
)
SWAPPED_TOKENS = range(65, 513)  # fewer: one row of 64; more: whole tiles of 128 rows waste little
MOST_SWAPPED_ROWS = 4  # of tiles, in each layer
HEIGHT_STEP = 16  # rows, for tokens that nobody measured: each height is a kernel to compile
WIDEST = max(max(family.n, family.down_n) for family in FAMILIES)
GROUPS = (1, 2, 4, 8, 16)
MIXES = (1.0, 0.75, 0.5, 0.25, 0.0)
PARTS = (2, 4, 8, 16)  # micro-batches of a call; more overfill the queue of a stream (timing.py)
CHUNK_ROWS = 64  # a micro-batch has whole tiles of the smallest kind
NCCL_CHOICES = ("ring/ll", "ring/ll128", "ring/simple")
LL_BYTES = 1 << 20  # above, LL loses: half of what it sends are flags
SIMPLE_BYTES = 256 << 10  # below, Simple loses: it waits for a fence and a flag a step
GRAPH_ROWS = 256  # above, a kernel outlasts the launch of the next one: no gap to close
PACES_US = (0.0, 4.0, 8.0, 12.0)


def default_config(problem: Problem) -> Config:
    """What to run when nothing is known: tensor parallel, the tile by tokens. `down` is divided by
    its columns or, where Y1 is much larger than Y2, by its sums."""
    wide = problem.h >= max(2 * problem.n, problem.gpus * WIDEST)
    if wide and problem.gpus > 1:
        return replace(_default_tiles(problem, 128), down_axis="h")
    return _default_tiles(problem, 256)


def _default_tiles(problem: Problem, single_m: int) -> Config:
    """The default by columns; up to `single_m` tokens CTAs load weights each for itself."""
    m, split, pairs = problem.m, default_split(problem.gpus), _in_pairs(problem)
    if m <= 128:
        rows = next(rows for rows in (16, 32, 64, 128) if m <= rows)
        columns = problem.h // problem.gpus
        wide = columns >= 64 * 128 and rows != 32  # half as many tiles, each in two parts, suffice
        direct = rows < 128
        slabs = 2 if wide or direct else 1
        family = Family(rows, 128 if wide else 64, slabs, split_k=2, direct=direct)
        return family.config(stage_split=split)
    pace_us = (8.0 if m >= 1024 else 4.0) if problem.gpus > 1 else 0.0
    if m <= 512:
        shared = pairs and m > single_m
        family = Family(128, 128, 2, multicast=shared, split_k=1 if shared else 2)
        return family.config(up_group=2, down_group=2, stage_split=split, pace_us=pace_us)
    group = 2 if m <= 1024 else 16
    family = Family(128, 256, 4, multicast=pairs)
    return family.config(up_group=group, down_group=group, stage_split=split, pace_us=pace_us)


def default_pipeline(problem: Problem) -> Config:
    """The pure pipeline of two GPUs or more to run when nothing is known: small panels."""
    m, pairs = problem.m, _in_pairs(problem)
    if m <= 256:
        return replace(_default_tiles(problem, 256), mix=0.0)
    n, slabs = (128, 2) if m <= 2048 else (256, 4)
    family = Family(128, n, slabs, multicast=pairs)
    group = 2 if m <= 4096 else 4
    return family.config(
        up_group=group,
        down_group=group,
        stage_split=default_split(problem.gpus),
        mix=0.0,
        pace_us=4.0,
    )


def _in_pairs(problem: Problem) -> bool:
    """Whether rows of 128-row tiles go in pairs, as multicast needs them."""
    return -(-problem.m // 128) % 2 == 0


def defaults(problem: Problem) -> list[Config]:
    """What is always tried: the default, and the paper's own form, a pure pipeline; if valid."""
    found = [default_config(problem)]
    if problem.gpus > 1:
        found.append(default_pipeline(problem))
    return [config for config in found if why_invalid(config, problem) is None]


def candidates(problem: Problem, *, sm_count: int = 132) -> Iterator[Config]:
    """Every valid config of the space for a problem, in a fixed order, each one once."""
    paces = PACES_US if problem.gpus > 1 else (0.0,)
    kernels = [
        family.config(up_group=up_group, down_group=down_group)
        for family in FAMILIES
        if _useful(family, problem.m)
        for up_group, down_group in _groups(-(-problem.m // family.m))
    ]
    kernels += swapped(problem)
    ways = _ways(problem.gpus)
    for kernel, (mix, split, axis), pace_us in product(kernels, ways, paces):
        way = {"mix": mix, "stage_split": split, "down_axis": axis, "pace_us": pace_us}
        config = replace(kernel, **way)
        if why_invalid(config, problem, sm_count=sm_count) is None:
            yield config


def swapped(problem: Problem) -> Iterator[Config]:
    """Tiles with `swap_ab`, as high as the tokens need in so many rows of tiles of each layer.

    Each layer may be split along K; tiles that are not go in multicast pairs where their rows come
    in pairs. `stage_split` and the rest of the way are the caller's.
    """
    if problem.m not in SWAPPED_TOKENS:
        return
    for n in (64, 128):
        for (up_rows, up), (down_rows, down) in product(_swapped_tiles(problem.m, n), repeat=2):
            most = 1 if n == 64 else 2  # times as many rows in one layer as in the other
            if max(up_rows, down_rows) > most * min(up_rows, down_rows):
                continue
            whole = [r for r, tile in ((up_rows, up), (down_rows, down)) if tile.split_k == 1]
            pairs = bool(whole) and all(rows % 2 == 0 for rows in whole)
            kind = {"swap_ab": True, "multicast": pairs, "d_slabs": n // WGMMA_ROWS}
            config = _deepest(Config(up=up, down=down, **kind, stages=MIN_STAGES))
            if not _runs_empty(config):
                yield config


def _swapped_tiles(m: int, n: int) -> list[tuple[int, Tile]]:
    """Tiles of n columns whole and in two parts, with the number of their rows, all one group."""
    found = []
    for rows, split in product(range(1, MOST_SWAPPED_ROWS + 1), (1, 2)):
        height = -(-m // (rows * 8 * split)) * 8 * split  # each part has whole groups of 8 rows
        if height in SWAPPED_ROWS:
            group = 1 << (rows - 1).bit_length()
            found.append((rows, Tile(m=height, n=n, group_m=group, split_k=split)))
    return found


def fitted(config: Config, of: int, m: int) -> Config:
    """A config for `of` tokens as m tokens need it: with `swap_ab` as many rows of tiles, hardly
    higher than they have to be, and the deepest ring; else, or where that is too short, the same.
    """
    if not config.swap_ab or of == m:
        return config

    def high(tile: Tile) -> Tile:
        unit = max(HEIGHT_STEP, 8 * tile.split_k)
        height = -(-m // (-(-of // tile.m) * unit)) * unit
        return replace(tile, m=max(SWAPPED_ROWS[0], height))

    up, down = high(config.up), high(config.down)
    rows = [-(-m // tile.m) for tile in (up, down) if config.pairs(tile)]
    pairs = bool(rows) and all(count % 2 == 0 for count in rows)
    found = _deepest(replace(config, up=up, down=down, multicast=pairs, stages=MIN_STAGES))
    return config if _runs_empty(found) else found


def _runs_empty(config: Config) -> bool:
    """Whether a ring of stages is as short as can be: the math then waits for loads."""
    return min(config.stages, down_stages(config)) <= MIN_STAGES


def _useful(family: Family, m: int) -> bool:
    """Whether a tile is neither half empty nor so low that it computes most rows for nothing."""
    fits = family.m >= WGMMA_ROWS or m <= family.m
    return fits and (m > family.m // 2 or family.m == FAMILIES[0].m)


def _ways(gpus: int) -> list[tuple[float, tuple[int, int], DownAxis]]:
    """Mix, stage split and axis: tensor parallel with either axis, and each other mix with 1/4,
    1/2 (rounded down, and up as the default is) or 3/4 of the GPUs up."""
    if gpus == 1:
        return [(1.0, default_split(1), "n")]
    quarters = {max(1, gpus * count // 4) for count in (1, 2, 3)}
    splits = sorted(quarters | {default_split(gpus)[0]})
    return [
        (1.0, default_split(gpus), "n"),
        (1.0, default_split(gpus), "h"),
        *((mix, (p, gpus - p), "n") for mix in MIXES if mix < 1.0 for p in splits),
    ]


def _groups(rows: int) -> list[tuple[int, int]]:
    """Tile rows walked together in each layer: at most a factor of two apart, none a repetition."""
    useful = [group for group in GROUPS if group == 1 or group < 2 * rows]
    return [(up, down) for up in useful for down in useful if up <= 2 * down and down <= 2 * up]


def answers(config: Config | Baseline, gpus: int) -> bool:
    """Whether a method may be the answer for a number of GPUs: Y2 lies as asked, no copies.

    `single` leaves Y2 on one GPU, and `rowsplit` copies weights, which nobody allowed.
    """
    return config.method != "rowsplit" and (config.method != "single" or gpus == 1)


def baselines(problem: Problem) -> list[Baseline]:
    """Every baseline that races in a search of this problem; their Y2 lies on every GPU, wherever
    it is asked for."""
    ways = (False, True) if problem.m <= GRAPH_ROWS else (False,)
    found = [Baseline(method="single", graph=graph) for graph in ways]
    if problem.gpus > 1:
        found += [Baseline(method="tp", nccl=nccl) for nccl in _nccl_choices(problem)]
        found += [Baseline(method="tp_twoshot", graph=graph) for graph in ways]
        found += [Baseline(method="rowsplit")]
    if problem.gpus == 2:
        chunks = _chunks(problem.m)
        found += [Baseline(method="microbatch", chunk=chunk) for chunk in chunks]
        found += [Baseline(method="microbatch_cta", chunk=chunk) for chunk in chunks]
    return found


def _nccl_choices(problem: Problem) -> list[str]:
    """NCCL's own choice and those that make sense for the bytes of Y2 on each GPU."""
    nbytes = problem.m * problem.n * DTYPES[problem.dtype]
    senseless = {"ring/ll": nbytes > LL_BYTES, "ring/simple": nbytes < SIMPLE_BYTES}
    return ["", *(choice for choice in NCCL_CHOICES if not senseless.get(choice))]


def _chunks(m: int) -> list[int]:
    """Rows of a micro-batch: PARTS of m in whole CHUNK_ROWS, the largest first, each one once."""
    rows = [-(-m // (parts * CHUNK_ROWS)) * CHUNK_ROWS for parts in PARTS]
    return sorted({chunk for chunk in rows if chunk < m}, reverse=True)
