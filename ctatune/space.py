"""The search space: which configs exist, and the one function that says why one cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ctatune.config import Baseline, Config, Tile
from ctatune.problem import DTYPES, Problem

TILE_K = 64  # 128 bytes of bf16: one row of the widest TMA swizzle
SMEM_BYTES = 232_448  # 227 KiB that one CTA of sm_90 can have
BARRIER_BYTES = 8
ALIGNMENT_BYTES = 16  # TMA: the pitch of a row in memory
MATH_GROUPS = 2
MAX_ACCUMULATORS = 128  # fp32 registers a thread that leave room at 232 registers (no spills)
HBM_BYTES = 141e9  # H200
MIN_STAGES = 2


def smem_bytes(config: Config) -> int:
    """Dynamic shared memory of one CTA: the ring of stages, the slabs, and their barriers."""
    rows_m = max(config.up.m, config.down.m)
    rows_n = max(config.up.n, config.down.n)
    stages = config.stages * (rows_m + rows_n) * 2 * TILE_K
    slabs = config.d_slabs * rows_m * 2 * 64
    return stages + slabs + 2 * BARRIER_BYTES * (config.stages + config.d_slabs)


def default_split(gpus: int) -> tuple[int, int]:
    """The stage split in the middle, and the way in which mix 1 is written."""
    return gpus - gpus // 2, gpus // 2


def why_invalid(config: Config, problem: Problem, *, sm_count: int = 132) -> str | None:
    """The rule that a config breaks for a problem on a GPU with `sm_count` SMs, or None."""
    return _why_shape(problem) or _why_tiles(config) or _why_split(config, problem, sm_count)


def _why_shape(problem: Problem) -> str | None:
    size = DTYPES[problem.dtype]
    for name in ("k", "h", "n"):
        pitch = getattr(problem, name) * size
        if pitch % ALIGNMENT_BYTES:
            rule = f"a multiple of {ALIGNMENT_BYTES // size} (TMA: pitch of a row)"
            return f"{name} must be {rule}, got {getattr(problem, name)}"
    weights = problem.weight_bytes / problem.gpus
    y1 = 2 * size * problem.m * problem.h
    if weights + y1 + size * problem.m * (problem.k + problem.n) > HBM_BYTES:
        return f"weights and activations do not fit into {HBM_BYTES / 1e9:.0f} GB of GPU memory"
    return None


def _why_tiles(config: Config) -> str | None:
    return (
        _why_tile("up", config.up, config)
        or _why_tile("down", config.down, config)
        or _why_memory(config)
    )


def _why_tile(name: str, tile: Tile, config: Config) -> str | None:
    if tile.m not in (64, 128, 256):
        return f"{name} tile m must be 64, 128 or 256 (WGMMA m, two math groups), got {tile.m}"
    groups_n = MATH_GROUPS if tile.m == 64 else 1  # groups stand along n when m is only 64
    if tile.n > 256 or tile.n % (64 * groups_n):
        rule = f"a multiple of {64 * groups_n} up to 256 (64 columns a slab and math group)"
        return f"{name} tile n must be {rule}, got {tile.n}"
    if tile.m * tile.n > MAX_ACCUMULATORS * MATH_GROUPS * 128:
        rule = f"at most {MAX_ACCUMULATORS} accumulators a thread"
        return f"{name} tile must need {rule}, got {tile.m}x{tile.n}"
    if groups_n > 1 and config.d_slabs < tile.n // 128 + 1:
        rule = f"at least {tile.n // 128 + 1} (a math group may not run a ring turn ahead)"
        return f"d_slabs must be {rule} for {tile.m}x{tile.n}, got {config.d_slabs}"
    return None


def _why_memory(config: Config) -> str | None:
    if config.stages < MIN_STAGES:
        rule = f"at least {MIN_STAGES} (one loads while one computes)"
        return f"stages must be {rule}, got {config.stages}"
    if config.pace_us and config.d_slabs * 64 < max(config.up.n, config.down.n):
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
    if config.down_axis != "n":
        return "down_axis h is not built yet: the kernel has no reduction over GPUs"
    if not 0 <= config.ctas <= sm_count:
        return f"ctas must be at most one an SM ({sm_count}), got {config.ctas}"
    return None


# (tile m, tile n, stages, d_slabs) that fill shared memory: the deepest ring that leaves room for
# a whole tile of slabs, half a tile, or as many as `why_invalid` asks for (DESIGN 5).
SHAPES = (
    (128, 256, 3, 4),
    (128, 256, 4, 2),
    (128, 192, 4, 3),
    (256, 128, 3, 2),
    (128, 128, 6, 2),
    (64, 256, 5, 3),
    (64, 128, 8, 2),
)
GROUPS = (1, 2, 4, 8, 16)
MIXES = (1.0, 0.75, 0.5, 0.25, 0.0)
PARTS = (2, 4, 8, 16)  # micro-batches of a call; more overfill the queue of a stream (timing.py)
CHUNK_ROWS = 64  # a micro-batch has whole tiles of the smallest kind
NCCL_CHOICES = ("ring/ll", "ring/ll128", "ring/simple")
LL_BYTES = 1 << 20  # above, LL loses: half of what it sends are flags
SIMPLE_BYTES = 256 << 10  # below, Simple loses: it waits for a fence and a flag a step
GRAPH_ROWS = 256  # above, a kernel outlasts the launch of the next one: no gap to close
MICROBATCH_CTA = False  # <- switch: True once `launch.Gemm` exists
PACES_US = (0.0, 4.0, 8.0, 12.0)


def default_config(problem: Problem) -> Config:
    """What to run when nothing is known: tensor parallel by columns, paced from 1024 tokens."""
    m, n, stages, slabs = (64, 128, 8, 2) if problem.m <= 64 else (128, 256, 3, 4)
    tile = Tile(m=m, n=n)
    return Config(
        up=tile,
        down=tile,
        stages=stages,
        d_slabs=slabs,
        stage_split=default_split(problem.gpus),
        pace_us=8.0 if problem.gpus > 1 and problem.m >= 1024 else 0.0,
    )


def candidates(problem: Problem, *, sm_count: int = 132) -> Iterator[Config]:
    """Every valid config of the space for a problem, in a fixed order, each one once."""
    paces = PACES_US if problem.gpus > 1 else (0.0,)
    for (m, n, stages, slabs), way, pace_us in product(SHAPES, _ways(problem.gpus), paces):
        mix, split = way
        for up_group, down_group in _groups(-(-problem.m // m)):
            config = Config(
                up=Tile(m=m, n=n, group_m=up_group),
                down=Tile(m=m, n=n, group_m=down_group),
                stages=stages,
                d_slabs=slabs,
                stage_split=split,
                mix=mix,
                pace_us=pace_us,
            )
            if why_invalid(config, problem, sm_count=sm_count) is None:
                yield config


def _ways(gpus: int) -> list[tuple[float, tuple[int, int]]]:
    """Mix and stage split: tensor parallel, and each mix with 1/4, 1/2 or 3/4 of the GPUs up."""
    splits = sorted({max(1, gpus * quarters // 4) for quarters in (1, 2, 3)} if gpus > 1 else ())
    pipelines = [(mix, (p, gpus - p)) for mix in MIXES if mix < 1.0 for p in splits]
    return [(1.0, default_split(gpus)), *pipelines]


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
    """Every baseline that races in a search of this problem."""
    ways = (False, True) if problem.m <= GRAPH_ROWS else (False,)
    found = [Baseline(method="single", graph=graph) for graph in ways]
    if problem.gpus > 1 and problem.output == "replicated":
        found += [
            Baseline(method="tp", nccl=nccl, graph=graph)
            for nccl in _nccl_choices(problem)
            for graph in ways
        ]
        found += [Baseline(method="tp_twoshot", graph=graph) for graph in ways]
        found += [Baseline(method="rowsplit")]
    if problem.gpus == 2 and problem.output == "replicated":
        chunks = _chunks(problem.m)
        found += [Baseline(method="microbatch", chunk=chunk) for chunk in chunks]
        if MICROBATCH_CTA:
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
