"""The values that travel between measurement, model, store and answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["ok", "invalid", "compile_error", "launch_error", "wrong", "timeout", "throttled"]
Source = Literal["measured", "neighbour", "simulated", "predicted"]  # of an answer
Phase = Literal["screen", "final", "control"]  # control: the second entry of one in a final
# Versions of the measurement protocol; a change makes older rows incomparable. 2: all contestants
# of a race load for the same part of the time, and eight operand sets rotate. 3: loads are dense:
# the host enqueues a batch while the one before runs. Of races alone, 4: no pause between load and
# chain where hosts keep ahead, and one of the same length for all where one does not; 5: half of
# what runs without a pause is timed, no more its last 10 ms alone. Of screenings alone, 4: rows of
# weights and of Y1 begin with cache lines. Where they did before, 3 is the same.
SCREENING, RACING = 4, 5
OLDER_RACING = (3, 4)  # races that count until there is one of the present protocol
DENSE = 3  # the last protocol in which rows were dense

RELATIVE_LIMIT = 4e-3  # bf16 rounding of Y2 alone is 1.7e-3 of its norm
WORST_LIMIT = 0.06  # half a bf16 step at 8 is 0.031, plus a flipped rounding of Y1


def protocol_of(phase: Phase) -> int:
    """The version of the protocol by which rows of a phase are measured."""
    return SCREENING if phase == "screen" else RACING


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """The machine as an identity: what else than the config moves a latency."""

    name: str  # for people and --platform, such as "nvidia-h200-nv18"
    gpu: str
    gpus: int
    link: str  # between every pair of GPUs, such as "NV18"; "none" for one GPU
    sm_count: int
    l2_bytes: int
    power_limit_w: int
    driver: str
    cuda: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Under which load and cache state a latency was taken (DESIGN 6)."""

    load: Literal["sustained", "burst"] = "sustained"
    cache: Literal["cold", "warm"] = "cold"

    def __str__(self) -> str:
        return f"{self.load}/{self.cache}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Comparison of one run with a higher-precision reference, outputs poisoned before it.

    `relative_error` is ||out - ref|| / ||ref||, `worst_error` the largest |out - ref| over the
    root mean square of ref. `bitwise_equal` compares with the same kernel on one GPU (None: not
    applicable).
    """

    passed: bool
    seed: int
    relative_error: float
    worst_error: float
    nans: int
    bitwise_equal: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBuild:
    """What the compiler made of a config: identity of the code and its resources."""

    hash: str
    compiler: str
    registers: int
    local_bytes: int  # a thread's local memory: spills show here
    smem_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One trial on hardware. Latencies in microseconds a call; None when nothing was timed.

    `samples_us` holds one latency a round (floor already subtracted), `interval_us` the 95 %
    bootstrap interval of their median. `gpu_state` holds what NVML said before and after.
    """

    outcome: Outcome
    phase: Phase = "screen"
    detail: str = ""
    latency_us: float | None = None
    interval_us: tuple[float, float] | None = None
    samples_us: tuple[float, ...] = ()
    floor_us: float | None = None
    single_shot_us: float | None = None
    regime: Regime = field(default_factory=Regime)
    verification: Verification | None = None
    kernel: KernelBuild | None = None
    gpu_state: dict[str, object] = field(default_factory=dict)

    @property
    def timed(self) -> bool:
        """Whether the outcome is ok and all latencies are positive and finite."""
        latencies = (self.latency_us, *self.samples_us)
        good = all(us is not None and 0.0 < us < math.inf for us in latencies)
        return self.outcome == "ok" and bool(self.samples_us) and good


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A latency computed by a model, in microseconds. Never stored or served as a measurement."""

    latency_us: float
    interval_us: tuple[float, float]
    model: str  # name and version, such as "estimate-1" or "simulator-1"
