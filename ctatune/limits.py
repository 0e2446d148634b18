"""What a GPU can run: resources of a config, and the one function that says why it cannot run."""

from __future__ import annotations

from ctatune.config import Config, Tile
from ctatune.problem import DTYPES, Problem

TILE_K = 64  # 128 bytes of bf16: one row of the widest TMA swizzle
SMEM_BYTES = 232_448  # 227 KiB that one CTA of sm_90 can have
BARRIER_BYTES = 8
WGMMA_ROWS = 64  # the least that an instruction computes
SWAPPED_ROWS = range(64, 257, 8)  # of tiles whose rows are the n of an instruction
MAX_SPLIT = 4
ALIGNMENT_BYTES = 16  # TMA: the pitch of a row in memory
MAX_ACCUMULATORS = 128  # fp32 registers a thread that leave room at 232 registers (no spills)
HBM_BYTES = 141e9  # H200
MIN_STAGES = 2


def math_groups(config: Config) -> int:
    """Warpgroups that compute: two, or one where both tiles are as small as one can compute."""
    if config.swap_ab:
        return config.up.n // WGMMA_ROWS
    small = all(tile.m <= WGMMA_ROWS and tile.n == 64 for tile in config.tiles)
    return 1 if small else 2


def stage_bytes(tile: Tile) -> int:
    """Shared memory of one K block of a tile's operands."""
    return (tile.m + tile.n) * 2 * TILE_K


def out_rows(tile: Tile) -> int:
    """Rows of a tile that one CTA of its cluster stores."""
    return max(WGMMA_ROWS, tile.m) // tile.split_k


def slab_columns(tile: Tile) -> int:
    """Columns of a slab: 64, or 32 where 64 do not divide the tile."""
    return TILE_K // 2 if tile.n % TILE_K else TILE_K


def _slab_bytes(tile: Tile) -> int:
    return 2 * out_rows(tile) * slab_columns(tile)


def down_stages(config: Config) -> int:
    """Depth of the ring of `down`: what fits into the memory of that of `up`."""
    return config.stages * stage_bytes(config.up) // stage_bytes(config.down)


def smem_bytes(config: Config) -> int:
    """Dynamic shared memory of one CTA: ring of stages, slabs, partial sums, barriers."""
    tiles = config.tiles
    slab_bytes = 0 if config.direct else max(map(_slab_bytes, tiles))
    slabs = config.d_slabs * slab_bytes
    sums = max((tile.split_k - 1) * out_rows(tile) * tile.n * 4 for tile in tiles)
    rings = len({(tile.m, tile.n, config.pairs(tile)) for tile in tiles})
    depth = max(config.stages, down_stages(config))
    barriers = BARRIER_BYTES * (2 * rings * depth + 2 * config.d_slabs + 5)
    return config.stages * stage_bytes(config.up) + slabs + sums + barriers


def default_split(gpus: int) -> tuple[int, int]:
    """The stage split in the middle, and the way in which mix 1 is written."""
    return gpus - gpus // 2, gpus // 2


def why_invalid(config: Config, problem: Problem, *, sm_count: int = 132) -> str | None:
    """The rule that a config breaks for a problem on a GPU with `sm_count` SMs, or None."""
    return (
        _why_shape(problem)
        or _why_tiles(config)
        or _why_split(config, problem, sm_count)
        or _why_axis(config, problem)
    )


def _why_shape(problem: Problem) -> str | None:
    size = DTYPES[problem.dtype]
    for name in ("k", "h", "n"):
        pitch = getattr(problem, name) * size
        if pitch % ALIGNMENT_BYTES:
            rule = f"a multiple of {ALIGNMENT_BYTES // size} (TMA: pitch of a row)"
            return f"{name} must be {rule}, got {getattr(problem, name)}"
    return _why_too_large(problem, 0)


def _why_too_large(problem: Problem, partial_columns: int) -> str | None:
    """The rule that it breaks with so many columns of partial sums behind Y1, or None."""
    columns = problem.k + 2 * (problem.h + partial_columns) + problem.n  # Y1 is there twice
    activations = DTYPES[problem.dtype] * problem.m * columns
    if problem.weight_bytes / problem.gpus + activations > HBM_BYTES:
        return f"weights and activations do not fit into {HBM_BYTES / 1e9:.0f} GB of GPU memory"
    return None


def _why_tiles(config: Config) -> str | None:
    return (
        _why_tile("up", config.up, config)
        or _why_tile("down", config.down, config)
        or _why_cluster(config)
        or _why_memory(config)
    )


def _why_tile(name: str, tile: Tile, config: Config) -> str | None:
    if config.swap_ab:
        return _why_swapped(name, tile, config)
    if tile.m not in (16, 32, 64, 128, 256):
        rule = "16, 32, 64, 128 or 256 (WGMMA m, two math groups)"
        return f"{name} tile m must be {rule}, got {tile.m}"
    groups = math_groups(config)
    groups_n = groups if tile.m <= WGMMA_ROWS else 1  # where groups stand along n
    unit = 128 if groups_n > 1 else 32
    if not 64 <= tile.n <= 256 or tile.n % unit:
        rule = f"a multiple of {unit} from 64 to 256 (columns of slabs and math groups)"
        return f"{name} tile n must be {rule}, got {tile.n}"
    if max(WGMMA_ROWS, tile.m) * tile.n > MAX_ACCUMULATORS * groups * 128:
        rule = f"at most {MAX_ACCUMULATORS} accumulators a thread"
        return f"{name} tile must need {rule}, got {tile.m}x{tile.n}"
    if config.direct and (config.d_slabs != 2 or config.pace_us):
        return "direct stores go at no pace, and take turns of 2 d_slabs: own GPU, peers"
    if not config.direct and groups_n > 1 and config.d_slabs < tile.n // 128 + 1:
        rule = f"at least {tile.n // 128 + 1} (a math group may not run a ring turn ahead)"
        return f"d_slabs must be {rule} for {tile.m}x{tile.n}, got {config.d_slabs}"
    return None


def _why_swapped(name: str, tile: Tile, config: Config) -> str | None:
    if tile.m not in SWAPPED_ROWS or tile.n not in (64, 128):
        rule = "a multiple of 8 from 64 to 256, x 64 or 128 (WGMMA n, math groups)"
        return f"{name} tile with swap_ab must be {rule}, got {tile.m}x{tile.n}"
    if config.direct:
        return "swap_ab does not go with direct stores (rows of a tile are columns)"
    if config.up.n != config.down.n:
        return "swap_ab needs tiles of one width in both layers (math groups)"
    if config.d_slabs < tile.n // 64:
        rule = f"at least {tile.n // 64} (a math group writes one)"
        return f"d_slabs must be {rule} for {tile.m}x{tile.n} with swap_ab, got {config.d_slabs}"
    return None


def _why_cluster(config: Config) -> str | None:
    splits = {config.up.split_k, config.down.split_k} - {1}
    for split in splits:
        if split not in (2, MAX_SPLIT) or len(splits) > 1:
            rule = f"1, 2 or {MAX_SPLIT}, and the same in both layers where it is not 1"
            return f"split_k must be {rule}, got {config.up.split_k} and {config.down.split_k}"
        if config.swap_ab and any(tile.m % (8 * tile.split_k) for tile in config.tiles):
            rule = f"a multiple of {8 * split} with split_k {split} and swap_ab (rows of one CTA)"
            return f"tile m must be {rule}"
        if not config.swap_ab and max(t.m for t in config.tiles if t.split_k > 1) > 128:
            return "split_k needs a tile m of at most 128 (each math warp has rows of one owner)"
    # Else warps that own sums in one layer do not in the other, and their barriers run ahead.
    sides = {tile.m >= 128 for tile in config.tiles if tile.split_k > 1}
    if len(sides) > 1 and not config.swap_ab:
        return "split_k in both layers needs both tile m of at least 128, or both of less"
    if config.multicast and (splits - {2} or not any(map(config.pairs, config.tiles))):
        return "multicast needs a layer with split_k 1, and at most 2 in the other (pairs of CTAs)"
    return None


def _why_memory(config: Config) -> str | None:
    if min(config.stages, down_stages(config)) < MIN_STAGES:
        rule = f"at least {MIN_STAGES} (one loads while one computes)"
        return f"stages must be {rule}, got {config.stages} of up, {down_stages(config)} of down"
    if config.pace_us and any(config.d_slabs * slab_columns(t) < t.n for t in config.tiles):
        rule = "room for a whole tile (a paced store must not hold up the math)"
        return f"pace_us needs {rule}, d_slabs is {config.d_slabs}"
    if config.d_slabs < 1:
        return f"d_slabs must be at least 1, got {config.d_slabs}"
    if smem_bytes(config) > SMEM_BYTES:
        rule = f"at most {SMEM_BYTES} bytes (227 KiB of one CTA)"
        return f"shared memory must be {rule}, got {smem_bytes(config)}"
    return None


def _why_split(config: Config, problem: Problem, sm_count: int) -> str | None:
    p_up, p_down = config.stage_split
    if p_up + p_down != problem.gpus:
        return f"stage split {p_up}:{p_down} does not add up to {problem.gpus} GPUs"
    if config.mix == 1.0 and config.stage_split != default_split(problem.gpus):
        return f"mix 1 uses no stages; its split is written {default_split(problem.gpus)}"
    if config.mix < 1.0 and min(config.stage_split) == 0:
        return "a pipeline needs a GPU in each stage"
    for name, tile in (("up", config.up), ("down", config.down)):
        rows = -(-problem.m // tile.m)
        if config.pairs(tile) and (rows % 2 or tile.group_m % 2):
            rule = "an even number of tile rows and an even group (tiles go in pairs)"
            return f"multicast needs {rule}, {name} has {rows} in groups of {tile.group_m}"
    most = resident_ctas(config, sm_count)
    if not 0 <= config.ctas <= most:
        return f"ctas must be at most {most} (those that run at the same time), got {config.ctas}"
    if config.ctas % config.cluster:
        return f"ctas must be a multiple of the cluster ({config.cluster}), got {config.ctas}"
    return None


def _why_axis(config: Config, problem: Problem) -> str | None:
    if config.down_axis == "n":
        return None
    if config.mix < 1.0 or problem.gpus < 2:
        return "down_axis h needs mix 1 and two GPUs or more (each sums over what it computed)"
    if problem.h <= (problem.gpus - 1) * config.up.n:
        return "down_axis h needs a tile of up on each GPU (it sums over what it computed)"
    if (config.up.m, config.up.split_k) != (config.down.m, config.down.split_k):
        return "down_axis h needs the same tile m and split_k in both layers (they share panels)"
    if any(tile.n % TILE_K for tile in config.tiles):
        return f"down_axis h needs tiles of whole K blocks, {TILE_K} columns (it adds their sums)"
    return _why_too_large(problem, problem.n + problem.gpus * config.down.n)


def resident_ctas(config: Config, sm_count: int) -> int:
    """CTAs that a GPU runs at the same time, as a model assumes (the driver knows: kernel.py).

    30 clusters of four fit on the 132 SMs of an H200, since none spans two GPCs.
    """
    return sm_count if config.cluster < 4 else sm_count // 11 * 10
