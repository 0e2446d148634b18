"""What this machine has and lacks, each by trying it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ctatune import baselines, jit, store
from ctatune.errors import CtatuneError
from ctatune.records import Platform
from ctatune.telemetry import gpu_count
from ctatune.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at. `good` is None where the thing is optional and absent."""

    what: str
    good: bool | None
    detail: str


def examine(database: str | None = None) -> list[Finding]:
    """Everything that a search needs, in the order in which it would need it."""
    return [
        Finding(what="python", good=sys.version_info >= (3, 11), detail=sys.version.split()[0]),
        _try("compiler", _compiler),
        _try("gpus", _gpus),
        _baselines(),
        _try("database", lambda: _database(database)),
    ]


def _try(what: str, look: Callable[[], Finding | str]) -> Finding:
    try:
        found = look()
    except CtatuneError as error:
        return Finding(what=what, good=False, detail=str(error))
    return found if isinstance(found, Finding) else Finding(what=what, good=True, detail=found)


def _compiler() -> str:
    jit.cubin("support")
    return f"{jit.compiler_versions()}, cubins in {jit.cache_folder()}"


def _gpus() -> Finding | str:
    count = gpu_count()
    if count == 0:
        detail = "none: search simulates, best answers from what is shipped"
        return Finding(what="gpus", good=None, detail=detail)
    with Worker(count) as worker:
        return f"{_describe(worker.platform)}; writes to every peer arrive"


def _describe(platform: Platform) -> str:
    values = asdict(platform)
    return ", ".join(f"{name} {values[name]}" for name in values)


def _baselines() -> Finding:
    missing = baselines.why_missing()
    return Finding(
        what="baselines",
        good=None if missing else True,
        detail=missing or "cuBLAS by nvmath-python",
    )


def _database(path: str | None) -> str:
    with store.Store.open(path or store.default_path()) as opened:
        return f"{opened.name}: {len(opened.measurements())} measurements"
