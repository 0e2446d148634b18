"""Makes a config, ours or a baseline's, ready to be called: placed on the GPUs with its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ctatune import baselines
from ctatune.config import AnyConfig, Config
from ctatune.gpus import Arena, Gpus
from ctatune.launch import PlacedSchedule
from ctatune.methods import Libraries
from ctatune.operands import Inputs, cold_sets, elements_read, place
from ctatune.problem import Problem
from ctatune.records import KernelBuild
from ctatune.schedule import Columns, build
from ctatune.timing import LAUNCHES


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A method ready to be called on the GPUs, with what verification needs to know of it.

    `launches`: how many operations a call enqueues on one stream, at most.
    """

    config: AnyConfig
    call: Callable[[int], None]
    check: Callable[[], None]
    poison: Callable[[], None]
    y2: dict[int, int]
    where: list[tuple[int, Columns]]
    kernel: KernelBuild | None
    launches: int = LAUNCHES


class Contestants:
    """Prepares contestants on `gpus`; cuBLAS and NCCL start with the first one that needs them."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._libraries = Libraries(gpus)

    def prepare(
        self,
        arena: Arena,
        problem: Problem,
        config: AnyConfig,
        seed: int,
        *,
        skip_wait: bool = False,
    ) -> Contestant:
        """A valid config with inputs from `seed`. `skip_wait` makes the negative control."""
        inputs = Inputs(self._gpus, arena, problem, seed)
        if isinstance(config, Config):
            return self._cta(arena, inputs, config, skip_wait=skip_wait)
        method = baselines.prepare(config, self._libraries, arena, inputs)
        whole = Columns(0, problem.n)
        return Contestant(
            config=config,
            call=method.call,
            check=method.check,
            poison=lambda: None,
            y2=method.y2,
            where=[(gpu, whole) for gpu in method.y2],
            kernel=method.kernel,
            launches=baselines.launches(config, problem),
        )

    def _cta(self, arena: Arena, inputs: Inputs, config: Config, *, skip_wait: bool) -> Contestant:
        schedule = build(inputs.problem, config)
        sets = place(inputs, schedule, cold_sets(self._gpus, elements_read(schedule)))
        placed = PlacedSchedule(self._gpus, arena, schedule, sets, skip_wait=skip_wait)
        return Contestant(
            config=config,
            call=placed.call,
            check=placed.check,
            poison=placed.poison,
            y2=dict(enumerate(sets[0].y2)),
            where=schedule.promised(),
            kernel=placed.build(),
        )
