"""What latency model and simulator share: the rates of one machine, and the time of a tile."""

from __future__ import annotations

import json
import math
import os
from dataclasses import Field, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ctatune.config import AnyConfig, Baseline, Config, Tile
from ctatune.errors import UsageError
from ctatune.limits import TILE_K, slab_columns
from ctatune.problem import BF16_BYTES, Problem
from ctatune.records import Platform, Prediction
from ctatune.rooms import room
from ctatune.work import Memory, TileTime, Work

DEFAULT_PLATFORM = "nvidia-h200-nv18"
L2_SHARE = 0.5  # of L2 that one operand can count on while the other streams through
Z90 = 1.645  # two-sided 90 % of a normal distribution
# A burst of peer stores cost the next four tiles 19, 14, 6 and 2 us, as CTAs drift apart; stored at
# a pace that just fills the time of the burst, 3 and 1 us (4096x8192x8192, 2026-11-30).
_BURST_FADE = 0.55  # of the loss from one tile of a CTA to its next
_PACED_PART = 0.1  # of the loss that pacing leaves
_OUTSIDE = 3.0  # times the log error to expect where nothing near was measured
_MAY_BE_ZERO = {
    *("hbm_half_ctas", "coalesced", "drift", "burst_loss"),
    *("flag_us", "launch_us", "tile_us", "flop_pj", "l2_pj", "hbm_pj"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineModel:
    """Rates and fixed costs of one platform; where each comes from stands in its JSON file.

    Units: as each name ends; `*_tflops`, `l2_gbps`, `hbm_gbps` and `local_store_gbps` are of a
    whole GPU, `sm_port_gbps` and `epilogue_gbps` of one SM, `link_gbps` of one direction of one
    GPU's link; `*_pj` a flop or a byte at the full clock; the rest has none.
    """

    platform: Platform
    peak_tflops: float
    peak_hbm_gbps: float
    tensor_tflops: float
    cublas_tflops: float
    l2_gbps: float
    sm_port_gbps: float
    load_us: float
    hbm_gbps: float
    hbm_half_ctas: float
    link_gbps: float
    local_store_gbps: float
    flag_us: float
    launch_us: float
    cublas_launch_us: float
    burst_loss: float
    tile_us: float
    epilogue_gbps: float
    static_w: float
    flop_pj: float
    l2_pj: float
    hbm_pj: float
    power_exponent: float
    drift: float
    coalesced: float
    overlap_power: float
    nccl_us: float
    nccl_gbps: float
    two_shot_us: float
    two_shot_gbps: float
    estimate_log_sigma: float
    simulator_log_sigma: float
    offsets: tuple[tuple[str, float], ...] = ()  # log of what a family takes more than modelled
    ranges: tuple[tuple[str, int, int], ...] = ()  # sizes of a problem that were measured
    linked: tuple[str, ...] = ()  # kinds of tiles that were measured on several GPUs

    def __post_init__(self) -> None:
        for item in rates():
            value = getattr(self, item.name)
            allowed = value > 0 or (item.name in _MAY_BE_ZERO and value == 0)
            if not (allowed and math.isfinite(value)):
                raise UsageError(f"{item.name} of a machine model must be positive, got {value}")
        for name, peak in (("tensor_tflops", "peak_tflops"), ("hbm_gbps", "peak_hbm_gbps")):
            if getattr(self, name) > getattr(self, peak):
                raise UsageError(f"{name} must not exceed {peak}, got {getattr(self, name)}")

    def for_gpus(self, gpus: int) -> MachineModel:
        """The same machine with at least `gpus` GPUs, all linked as those that were measured."""
        if gpus <= self.platform.gpus:
            return self
        return replace(self, platform=replace(self.platform, gpus=gpus))

    def factor(self, config: AnyConfig) -> float:
        """What a config takes, to what rates alone would make of it: the offset of its family."""
        return math.exp(dict(self.offsets).get(family(config), 0.0))

    def covers(self, problem: Problem) -> bool:
        """Whether the sizes of a problem lie between those that were measured."""
        return all(low <= getattr(problem, name) <= high for name, low, high in self.ranges)

    def outside(self, problem: Problem, config: AnyConfig) -> list[str]:
        """Where a problem, or a config for it, lies outside of what the model was fitted to."""
        found = []
        if not self.covers(problem):
            sizes = ", ".join(f"{name} {low} .. {high}" for name, low, high in self.ranges)
            found.append(f"outside of what it was fitted to ({sizes})")
        if isinstance(config, Config) and problem.gpus > 1 and tile_kind(config) not in self.linked:
            found.append("tiles of this kind were measured on one GPU at most")
        return found

    def doubt(self, problem: Problem, config: AnyConfig, log_sigma: float) -> float:
        """The log error to expect: more outside of what was measured."""
        return log_sigma * (_OUTSIDE if self.outside(problem, config) else 1.0)

    def roofline_us(self, problem: Problem, gpus: int) -> float:
        """Time that no method on `gpus` GPUs can beat: peak arithmetic, and reading every weight
        once. A measurement below this is a timing fault."""
        flops_us = problem.flops / (gpus * self.peak_tflops) * 1e-6
        return max(flops_us, problem.weight_bytes / (gpus * self.peak_hbm_gbps) * 1e-3)

    def clock(self, full_pj: float, full_us: float) -> float:
        """Part of the full clock that the power limit leaves a GPU in a call that would take so
        much energy and time at the full clock."""
        dynamic_w = full_pj / full_us * 1e-6
        most_w = self.platform.power_limit_w - self.static_w
        return min(1.0, (most_w / dynamic_w) ** (1.0 / self.power_exponent)) if dynamic_w else 1.0

    def energy_pj(self, work: Work) -> float:
        """Energy of the part of a layer on one GPU at the full clock, beside the static power."""
        if not work.tiles:
            return 0.0
        moved_pj = self.l2_pj * self.l2_bytes(work) + self.hbm_pj * self.hbm_bytes(work)
        return self.flop_pj * work.flops + moved_pj * work.tiles

    def in_step(self, work: Work) -> float:
        """Part of the operands that CTAs of a wave still read together.

        Nothing holds CTAs together, so with each wave they drift apart by a part of a tile; what
        passes through L2 between the first and the last reader of a byte grows with it.
        """
        passed_bytes = self.drift * work.tiles / work.ctas * work.wave_bytes
        return work.kept_bytes / (work.kept_bytes + passed_bytes)

    def l2_bytes(self, work: Work) -> float:
        """What one tile costs L2, in bytes: requests of several SMs for a line are merged, the
        more the more ask for it at the same time.
        """
        power = -self.coalesced * self.in_step(work)
        of_inputs, of_weights = work.readers
        weight_rows = work.tile.n / work.sharers
        input_rows = work.input_rows * work.lines
        rows = input_rows * of_inputs**power + weight_rows * of_weights**power
        return rows * work.row_bytes

    def hbm_bytes(self, work: Work) -> float:
        """What one tile reads from HBM, averaged over the tiles of a layer."""
        once, again = work.hbm_bytes
        return (once + (1.0 - self.in_step(work)) * again) / work.tiles

    def link_us(self, size_bytes: float) -> float:
        """Time that a transfer occupies one direction of one GPU's link."""
        return size_bytes / self.link_gbps * 1e-3

    def burst_loss_us(self, work: Work, peers: float, pace_us: float, tile_us: float) -> float:
        """What the first burst of stores to peers takes from the sender's next tile.

        All CTAs end a tile together; while their stores saturate the link, loads are held up.
        """
        burst_us = min(work.active * self.link_us(work.tile_bytes * peers), tile_us)
        if not burst_us:
            return 0.0
        unpaced = max(_PACED_PART, 1.0 - pace_us * work.tile.n / TILE_K / burst_us)
        return self.burst_loss * burst_us * unpaced

    def stream_us(self, size_bytes: float) -> float:
        """Time in which a kernel on all SMs reads so much from HBM."""
        share = 1.0 + self.hbm_half_ctas / self.platform.sm_count
        return size_bytes / self.hbm_gbps * share * 1e-3

    def local_store_us(self, size_bytes: float) -> float:
        """Time in which one SM stores to its own GPU's memory."""
        return size_bytes / self.local_store_gbps * self.platform.sm_count * 1e-3

    def together_us(self, compute_us: float, memory_us: float) -> float:
        """Compute and memory time of a kernel that overlap, but not perfectly: their p-norm."""
        longer, shorter = max(compute_us, memory_us), min(compute_us, memory_us)
        power = self.overlap_power
        return longer * (1.0 + (shorter / longer) ** power) ** (1.0 / power)

    def tensor_us(self, work: Work) -> float:
        """Tensor time of one tile at full clock."""
        flops = 2.0 * work.tile.m * work.tile.n * TILE_K * work.k_steps
        return flops / self.tensor_tflops * self.platform.sm_count * 1e-6

    def epilogue_us(self, tile: Tile) -> float:
        return tile.m * tile.n * BF16_BYTES / self.epilogue_gbps * 1e-3

    def tile_time(self, work: Work, clock: float = 1.0) -> TileTime:
        """The times that bound a tile, at a part of the full clock. L2 runs at the clock of SMs."""
        l2_bytes, hbm_bytes = self.l2_bytes(work), self.hbm_bytes(work)

        def memory(ahead: float) -> Memory:
            return Memory(
                port_us=(work.loaded_bytes - ahead) / self.sm_port_gbps / clock * 1e-3,
                l2_us=(l2_bytes - ahead) / self.l2_gbps / clock * 1e-3,
                hbm_us=max(0.0, hbm_bytes - ahead) / self.hbm_gbps * 1e-3,
                hbm_half_ctas=self.hbm_half_ctas,
            )

        wait_us = work.k_steps * self.load_us / (work.stages - 1)  # a short ring runs empty
        return TileTime(
            least_us=max(self.tensor_us(work) / clock, wait_us),
            memory=memory(0.0),
            memory_ahead=memory(work.ahead_bytes),
            between_us=self.tile_us + self.epilogue_us(work.tile) / clock,
        )


def faded(first: int, count: float = 1) -> float:
    """Sum of the parts of the first burst's loss that `count` bursts of a CTA from `first` cost."""
    return _BURST_FADE**first * (1.0 - _BURST_FADE ** max(0.0, count)) / (1.0 - _BURST_FADE)


def pace_delay_us(tile: Tile, pace_us: float, turn: float) -> float:
    """How late the last slab of a paced tile leaves; `turn` in [0, 1) is the CTA's among all."""
    slab = slab_columns(tile)
    return pace_us * slab / TILE_K * (tile.n // slab - 1 + turn)


def load(name: str | None = None) -> MachineModel:
    """The model of a platform (None: the default one). Raises: UsageError as `document` does."""
    return _model(DEFAULT_PLATFORM if name is None else name)


@cache
def _model(name: str) -> MachineModel:
    found = document(name)
    try:
        return model_of(found)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"the model of {name} is damaged: {error}") from error


def has_model(name: str) -> bool:
    """Whether there is a model of a platform."""
    return name in _documents()


def document(name: str) -> dict[str, Any]:
    """The file of a platform's model, as it stands in `models/`.

    Raises: UsageError when there is none; it names those that are.
    """
    known = ", ".join(_documents())
    if name not in _documents():
        raise UsageError(f"there is no model of platform {name!r}, only of {known}")
    return _documents()[name]


@cache
def _documents() -> dict[str, dict[str, Any]]:
    """The shipped models by platform, and before them those of `$CTATUNE_MODELS`, a folder."""
    own = os.environ.get("CTATUNE_MODELS")
    folders = [room("models"), *([Path(own)] if own else [])]
    found = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            found[str(read["platform"]["name"])] = read
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{path} is not a machine model: {error}") from error
    return found


def model_of(document: dict[str, Any]) -> MachineModel:
    """The model that a file of `models/` describes.

    Raises: ValueError, TypeError, KeyError or AttributeError when it describes none.
    """
    values = {key: float(entry["value"]) for key, entry in document["parameters"].items()}
    return MachineModel(
        platform=Platform(**document["platform"]),
        offsets=tuple((name, float(log)) for name, log in document["offsets"].items()),
        ranges=tuple(
            (name, int(low), int(high)) for name, (low, high) in document["ranges"].items()
        ),
        linked=tuple(map(str, document.get("linked", ()))),
        **values,
    )


def family(config: AnyConfig) -> str:
    """What shares an offset: a kind of tiles and the axis of `down`; a method."""
    if isinstance(config, Baseline):
        return config.method
    return tile_kind(config) + " axis h" * (config.down_axis == "h")


def tile_kind(config: Config) -> str:
    """The tiles of a config, and how operands come and results go."""
    kind = " multicast" * config.multicast + " direct" * config.direct + " swap" * config.swap_ab
    rows = "" if config.swap_ab else f"{config.up.m}x"  # swapped tiles: whatever their height
    down = "" if config.down.n == config.up.n else f"+{config.down.n}"
    splits = "" if config.down.split_k == config.up.split_k else f"+{config.down.split_k}"
    return f"{rows}{config.up.n}{down}/k{config.up.split_k}{splits}{kind}"


def rates() -> tuple[Field[Any], ...]:
    """The fields of a machine model that are numbers of the machine."""
    return tuple(item for item in fields(MachineModel) if item.type == "float")


def prediction(latency_us: float, log_sigma: float, model: str) -> Prediction:
    """A prediction with the 90 % interval of a log-normal error."""
    factor = math.exp(Z90 * log_sigma)
    interval_us = (latency_us / factor, latency_us * factor)
    return Prediction(latency_us=latency_us, interval_us=interval_us, model=model)
