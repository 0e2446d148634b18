"""What this machine has and lacks, each by trying it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ctatune import baselines, jit, store
from ctatune.errors import CtatuneError
from ctatune.telemetry import gpu_count
from ctatune.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at. `good` is None where the thing is optional and absent."""

    what: str
    good: bool | None
    detail: str


def examine(database: Path | None = None) -> list[Finding]:
    """Everything that a search needs, in the order in which it would need it."""
    return [
        _try("python", lambda: (sys.version_info >= (3, 11), sys.version.split()[0])),
        _try("compiler", _compiler),
        _try("gpus", _gpus),
        _try("baselines", _baselines),
        _try("database", lambda: _database(database)),
    ]


def _try(what: str, look: Callable[[], tuple[bool | None, str]]) -> Finding:
    try:
        good, detail = look()
    except CtatuneError as error:
        good, detail = False, str(error)
    return Finding(what=what, good=good, detail=detail)


def _compiler() -> tuple[bool, str]:
    jit.cubin("support")
    return True, f"{jit.compiler_versions()}, cubins in {jit.cache_folder()}"


def _gpus() -> tuple[bool | None, str]:
    count = gpu_count()
    if count == 0:
        return None, "none: search simulates, best answers from what is shipped"
    with Worker(count) as worker:
        platform = ", ".join(f"{name} {value}" for name, value in asdict(worker.platform).items())
    return True, f"{platform}; writes to every peer arrive"


def _baselines() -> tuple[bool | None, str]:
    missing = baselines.why_missing()
    return (None, missing) if missing else (True, "cuBLAS by nvmath-python")


def _database(path: Path | None) -> tuple[bool, str]:
    with store.Store.open(path or store.default_path()) as opened:
        counts = len(opened.measurements()), len(opened.predictions())
        return True, "{}: {} measurements, {} predictions".format(
            opened.name.removeprefix("database "), *counts
        )
