"""A child process that owns the GPUs for a search; killed and replaced when it hangs or breaks.

The parent never touches CUDA, so that no candidate can poison it.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from ctatune.config import AnyConfig
from ctatune.errors import CtatuneError, DeviceError
from ctatune.jit import cuda_error
from ctatune.problem import Problem
from ctatune.records import Measurement, Outcome, Platform

_log = logging.getLogger(__name__)

START_SECONDS = 90.0  # CUDA start, a cold compile of the support kernels, the peer probe
TRIAL_SECONDS = 120.0  # a cold compile is 10 s, a hang of the kernel ends by itself after 2 s
FINAL_SECONDS = 240.0
KILL_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class _LostError(Exception):
    """The child died or did not answer in time; `outcome` says which."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome: Outcome = outcome
        self.detail = detail


def make_bench(gpus: int) -> Any:
    """The real bench; imported in the child only."""
    from ctatune.measure import Bench

    return Bench(gpus)


class Worker:
    """Measures on `gpus` GPUs in a child process. Use as a context manager.

    `factory` builds the bench in the child (tests pass a fake one).
    Raises: DeviceError when the child cannot start on this machine.
    """

    def __init__(self, gpus: int, factory: Callable[[], Any] | None = None) -> None:
        self._factory = factory or partial(make_bench, gpus)
        self._process: Any = None
        self._pipe: Any = None
        self.platform: Platform = self._start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def trial(self, problem: Problem, config: AnyConfig, seed: int) -> Measurement:
        """Measure one config. Whatever goes wrong is a Measurement with another outcome."""
        try:
            return self._ask(TRIAL_SECONDS, "trial", problem, config, seed)
        except _LostError as lost:
            self._kill()
            return Measurement(outcome=lost.outcome, detail=lost.detail)

    def finals(
        self, problem: Problem, configs: Sequence[AnyConfig], seed: int
    ) -> list[Measurement]:
        """Measure configs against each other; all rows fail together when the child is lost."""
        try:
            return self._ask(FINAL_SECONDS, "finals", problem, list(configs), seed)
        except _LostError as lost:
            self._kill()
            row = Measurement(outcome=lost.outcome, detail=lost.detail, phase="final")
            return [row] * len(configs)

    def _start(self) -> Platform:
        self._kill()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._factory), daemon=True)
        self._process.start()
        theirs.close()
        try:
            return self._receive(START_SECONDS)
        except _LostError as lost:
            self._kill()
            raise DeviceError(lost.detail) from lost

    def _ask(self, seconds: float, *request: Any) -> Any:
        if self._process is None:
            self._start()
        try:
            self._pipe.send(request)
        except OSError as error:
            raise _LostError("launch_error", "the measuring process has died") from error
        return self._receive(seconds)

    def _receive(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise _LostError("timeout", f"the measuring process gave no answer in {seconds:g} s")
        try:
            good, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(5)
            code = self._process.exitcode
            raise _LostError("launch_error", f"the measuring process died (exit {code})") from error
        if not good:
            raise _LostError("launch_error", value)
        return value

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(KILL_SECONDS)  # one that is stuck in the driver is left behind
            self._pipe.close()
            self._process = None


def _serve(pipe: Connection, factory: Callable[[], Any]) -> None:
    """The child: build the bench, answer requests; end at the first fault, the parent restarts."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed search frees the GPUs
    faults = (CtatuneError, cuda_error(), RuntimeError, MemoryError, OSError)
    try:
        bench = factory()
        pipe.send((True, bench.platform()))
        while True:
            name, *arguments = pipe.recv()
            pipe.send((True, getattr(bench, name)(*arguments)))
    except (EOFError, KeyboardInterrupt):
        return
    except faults as error:
        _log.debug("%s", traceback.format_exc())
        message = str(error) if isinstance(error, CtatuneError) else repr(error)
        pipe.send((False, message.splitlines()[0]))
