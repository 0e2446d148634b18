"""One choice in full: method, stage split, mix, the tile of each layer and the order of tiles."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Literal, get_args

from ctatune.errors import UsageError

DownAxis = Literal["n", "h"]
BaselineMethod = Literal["single", "tp", "tp_twoshot", "microbatch", "microbatch_cta", "rowsplit"]
OWN_KERNEL = ("cta", "microbatch_cta")  # methods whose rows belong to one version of our kernel
NCCL_ALGORITHMS, NCCL_PROTOCOLS = ("ring", "tree"), ("ll", "ll128", "simple")
MAX_PACE_US = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The output tile of one layer and the order in which a GPU walks its tiles.

    `m` rows (tokens) by `n` columns (features). `group_m` tile rows are walked together, column
    by column (1: a whole panel before the next one). `split_k` CTAs of a cluster share a tile:
    each sums a part of K, and then stores a part of the rows.
    """

    m: int
    n: int
    group_m: int = 1
    split_k: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "n", "group_m", "split_k"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"tile {name} must be an integer of at least 1, got {value!r}")

    def __str__(self) -> str:
        split = f"/k{self.split_k}" if self.split_k > 1 else ""
        return f"{self.m}x{self.n}/g{self.group_m}{split}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A CTA-pipelined configuration. `canonical()` is its only key.

    `stage_split` is (p_up, p_down): how many GPUs belong to each stage. `mix` in [0, 1]: 0 is the
    pure pipeline, 1 is pure tensor parallel. `stages` is the depth of the shared-memory ring in
    tiles of `up` (`down` has as many of its own as fit into the same memory), `d_slabs` the number
    of 64-column slabs that finished tiles wait in. `ctas` is the number of CTAs on each GPU, 0 for
    as many as run at the same time. `pace_us` is the time between the stores of two slabs to peers
    by one CTA: spread out, they do not hold up the loads of tiles. With `multicast`, two CTAs whose
    tiles lie one above the other load their common weights once, in a layer whose tiles are not
    split. With `direct`, results are stored from registers and not through slabs and TMA. With
    `swap_ab`, weights are the first operand of WGMMA and tokens the second, so that rows of a tile
    can fit the tokens (`limits.SWAPPED_ROWS`).
    """

    up: Tile
    down: Tile
    stages: int
    d_slabs: int
    stage_split: tuple[int, int] = (1, 1)
    mix: float = 1.0
    down_axis: DownAxis = "n"
    ctas: int = 0
    pace_us: float = 0.0
    multicast: bool = False
    direct: bool = False
    swap_ab: bool = False
    method: Literal["cta"] = "cta"

    def __post_init__(self) -> None:
        _must_be(int, self, "stages", "d_slabs", "ctas")
        _must_be(bool, self, "multicast", "direct", "swap_ab")
        for name in ("mix", "pace_us"):
            if type(getattr(self, name)) is not int:
                _must_be(float, self, name)
            object.__setattr__(self, name, float(getattr(self, name)) + 0.0)  # never -0.0
        if any(type(gpus) is not int for gpus in tuple(self.stage_split)):
            raise UsageError(f"stage_split must hold integers, got {self.stage_split!r}")
        object.__setattr__(self, "stage_split", tuple(self.stage_split))
        if not 0.0 <= self.mix <= 1.0:
            raise UsageError(f"mix must be between 0 and 1, got {self.mix}")
        if self.down_axis not in ("n", "h"):
            raise UsageError(f"down_axis must be n or h, got {self.down_axis!r}")
        if not 0.0 <= self.pace_us <= MAX_PACE_US:
            raise UsageError(f"pace_us must be between 0 and {MAX_PACE_US:g}, got {self.pace_us}")
        if len(self.stage_split) != 2 or min(self.stage_split) < 0:
            raise UsageError(f"stage_split is p_up:p_down, got {self.stage_split}")

    @property
    def tiles(self) -> tuple[Tile, Tile]:
        """The tile of each layer."""
        return self.up, self.down

    def pairs(self, tile: Tile) -> bool:
        """Whether two tiles of this layer, one above the other, load their weights together."""
        return self.multicast and tile.split_k == 1

    @property
    def cluster(self) -> int:
        """CTAs of a cluster, which run at the same time on neighbouring SMs."""
        return 2 if self.multicast else max(self.up.split_k, self.down.split_k)

    def canonical(self) -> str:
        """The config as JSON with sorted keys and no spaces, without fields that are default."""
        return _canonical(self)

    def __str__(self) -> str:
        split = ":".join(map(str, self.stage_split))
        return (
            f"{self.method} up {self.up} down {self.down} stages {self.stages} "
            f"slabs {self.d_slabs} mix {self.mix:g} split {split} axis {self.down_axis}"
            + (f" ctas {self.ctas}" if self.ctas else "")
            + (f" pace {self.pace_us:g}" if self.pace_us else "")
            + (" multicast" if self.multicast else "")
            + (" direct" if self.direct else "")
            + (" swap" if self.swap_ab else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A way to run the problem other than CTA-pipelined.

    `single`: cuBLAS on one GPU. `tp`: columns and rows of the weights over all GPUs, cuBLAS and an
    all-reduce by NCCL. `tp_twoshot`: the same with our reduction over peer memory. `microbatch`:
    `up` on one GPU, `down` on another, `chunk` rows at a time by cuBLAS and copy engines.
    `microbatch_cta`: the same with our kernel as the GEMM. `rowsplit`: rows over GPUs, each with a
    copy of all weights.

    `nccl` is the algorithm and protocol that NCCL is held to, such as "ring/ll128"; "" leaves the
    choice to it. `graph`: a GPU's part of a call is replayed as a CUDA graph.
    """

    method: BaselineMethod = "single"
    chunk: int = 0
    nccl: str = ""
    graph: bool = False

    def __post_init__(self) -> None:
        _must_be(int, self, "chunk")
        _must_be(bool, self, "graph")
        if self.method not in get_args(BaselineMethod):
            raise UsageError(f"no such method: {self.method!r}")
        if (self.chunk > 0) != (self.method in ("microbatch", "microbatch_cta")):
            raise UsageError(f"chunk belongs to microbatch, got {self.chunk} for {self.method}")
        if self.nccl and self.method != "tp":
            raise UsageError(f"nccl belongs to tp, got {self.nccl!r} for {self.method}")
        algorithm, _, protocol = self.nccl.partition("/")
        if self.nccl and (algorithm not in NCCL_ALGORITHMS or protocol not in NCCL_PROTOCOLS):
            raise UsageError(f"nccl is an algorithm/protocol such as ring/ll, got {self.nccl!r}")
        if self.graph and self.method not in ("single", "tp_twoshot"):
            raise UsageError(f"graph belongs to single and tp_twoshot, got {self.method}")

    def canonical(self) -> str:
        """The baseline as JSON with sorted keys and no spaces, without fields that are default."""
        return _canonical(self)

    def __str__(self) -> str:
        return (
            self.method
            + (f" chunk {self.chunk}" if self.chunk else "")
            + (f" nccl {self.nccl}" if self.nccl else "")
            + (" graph" if self.graph else "")
        )


AnyConfig = Config | Baseline
_KINDS = {int: "an integer", float: "a number", bool: "true or false"}


def _must_be(kind: type, config: AnyConfig, *names: str) -> None:
    """Equal configs have equal keys: True is not 1, nor 1.0."""
    for name in names:
        if type(value := getattr(config, name)) is not kind:
            raise UsageError(f"{name} must be {_KINDS[kind]}, got {value!r}")


def parse_config(text: str) -> AnyConfig:
    """The inverse of `canonical`.

    Raises: UsageError when the text is not a config.
    """
    try:
        fields = json.loads(text)
        if fields.get("method", "cta") != "cta":
            return Baseline(**fields)
        return Config(**fields | {"up": Tile(**fields["up"]), "down": Tile(**fields["down"])})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"not a config: {text!r} ({error})") from error


def _canonical(config: AnyConfig) -> str:
    """A field that is added later, with the old behaviour as its default, changes no key."""
    default = _defaults(type(config))
    values = {n: v for n, v in asdict(config).items() if n not in default or v != default[n]}
    for tile in (values.get("up", {}), values.get("down", {})):
        if tile.get("split_k") == 1:
            del tile["split_k"]
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


@cache
def _defaults(kind: type[AnyConfig]) -> dict[str, object]:
    return {field.name: field.default for field in fields(kind) if field.name != "method"}


def digest(text: str) -> str:
    """Sixteen hexadecimal digits of SHA-256: the short name of any canonical text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
