"""Wires a search together: the store, the machine or its model, and the answer at the end."""

from __future__ import annotations

import platform as python_platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from ctatune import calibrate, jit, machine_model, search
from ctatune.choice import Choice, choose
from ctatune.computed import rank
from ctatune.config import Config
from ctatune.errors import DeviceError, UsageError
from ctatune.machine_model import MachineModel
from ctatune.problem import Problem
from ctatune.store import Store, default_path
from ctatune.telemetry import gpu_count
from ctatune.worker import Worker

COMPILED = 32  # configs of a calibration, together
_RECORDED = (
    *("ctatune", "cuda-bindings", "cuda-core", "nvmath-python", "nccl4py", "optuna"),
    *("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)


class Session:
    """One `search` command: a store, a run in it, and a worker or None for the simulator."""

    def __init__(
        self, store: Store, path: Path, machine: MachineModel, worker: Worker | None, command: str
    ) -> None:
        self._store, self._path, self._worker, self._machine = store, path, worker, machine
        self._platform = worker.platform if worker else machine.platform
        self._run_id = store.begin_run(
            self._platform,
            command=command,
            compiler=jit.compiler_versions(),
            versions=_versions(),
        )

    @property
    def simulates(self) -> bool:
        return self._worker is None

    @property
    def note(self) -> str:
        """The one line that says that nothing is measured."""
        return f"no GPU is used: simulating {self._platform.name}; what is stored is a prediction"

    def search(
        self,
        problem: Problem,
        report: search.Report,
        *,
        trials: int,
        seconds: float | None = None,
        race: bool = False,
    ) -> Choice:
        """Search one problem and look the answer up as anybody would.

        `race`: let the finalists race even when no trial was left to make.
        """
        machine, store, run_id = self._machine, self._store, self._run_id
        if self._worker:
            judge = search.Hardware(problem, store, run_id, self._worker, machine)
            known = judge.known()
            todo = [c for c in search.first(problem, rank(problem, machine)) if c not in known]
            tried = sum(isinstance(config, Config) for config in known)
            half = None if seconds is None else seconds / 2
            jit.compile_together(todo[: max(0, trials - tried)], half)
        else:
            judge = search.Simulated(problem, store, run_id, machine)
        search.search(problem, judge, machine, report, trials=trials, seconds=seconds, race=race)
        return choose(problem, self._path, self._platform.name)

    def calibrate(
        self,
        problems: Sequence[Problem],
        report: Callable[[Problem, int], None],
        seconds: float,
        configs: int | None = None,
    ) -> None:
        """Screen `calibrate.plan` of every problem until time is up.

        What is stored is not measured again. `report` hears of each shape and of how many configs
        were timed. Raises: DeviceError without a GPU.
        """
        if self._worker is None:
            raise DeviceError("a calibration needs GPUs")
        end = time.monotonic() + seconds
        for problem in problems:
            judge = search.Hardware(problem, self._store, self._run_id, self._worker, self._machine)
            known, timed = judge.known(), 0
            todo = [config for config in calibrate.plan(problem, configs) if config not in known]
            for i, config in enumerate(todo):
                if time.monotonic() > end:
                    return
                if i % COMPILED == 0:
                    jit.compile_together(todo[i : i + COMPILED])
                timed += judge.trial(config)[0] is not None
            report(problem, timed)


@contextmanager
def open_session(
    gpus: int, db: Path | None, platform: str | None, command: str
) -> Iterator[Session]:
    """A session on this machine's GPUs, or on the simulator where there is none.

    Raises: DeviceError when there are some GPUs but fewer than asked for; UsageError for an
    unknown platform; StoreError when the database cannot be written.
    """
    path = db or default_path()
    present = gpu_count()
    simulates = present == 0 or platform is not None
    if not simulates and present < gpus:
        raise DeviceError(f"{gpus} GPUs are asked for, this machine has {present}")
    with Store.open(path) as store, nullcontext() if simulates else Worker(gpus) as worker:
        machine = _model_of(worker) if worker else machine_model.load(platform)
        yield Session(store, path, machine.for_gpus(gpus), worker, command)


def _model_of(worker: Worker) -> MachineModel:
    """The model of this machine; an unknown one borrows the rates of the shipped one."""
    try:
        return machine_model.load(worker.platform.name)
    except UsageError:
        return replace(machine_model.load(), platform=worker.platform)


def _versions() -> dict[str, str]:
    found = {wheel: version for wheel in _RECORDED if (version := jit.version_of(wheel))}
    own = {"python": python_platform.python_version(), "kernel": jit.kernel_hash()}
    return own | found
