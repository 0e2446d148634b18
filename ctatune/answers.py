"""Answers in microseconds: what `best` said is kept until the user's database changes.

A serving engine asks thousands of times a second. The first question about a problem reads the
database; every later one is a look into a dict that is never changed in place.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ctatune.choice import Choice

CHECK_SECONDS = 0.01  # between two looks at the file: two `stat` calls cost 5 us

_Stamp = tuple[tuple[int, int, int] | None, ...]


class _Kept(NamedTuple):
    """Answers from one state of a database, good until `until` without another look at it."""

    path: Path
    stamp: _Stamp
    until: float
    answers: dict[tuple[Any, ...], Choice]


_lock = threading.Lock()
_kept: dict[Path | None, _Kept] = {}


def best(
    shape: str,
    *,
    gpus: int,
    dtype: str = "bf16",
    activation: str = "none",
    output: str = "replicated",
    db: Path | None = None,
    platform: str | None = None,
) -> Choice:
    """The fastest config known for a problem (`choice.choose` says how), from memory if it can be.

    Thread-safe. A change of the database, by whatever process, is seen after CHECK_SECONDS at
    most; `refresh` sees it at once.

    Raises: NoAnswer; UsageError for an impossible problem; StoreError for a damaged database.
    """
    question = (shape, gpus, dtype, activation, output, platform)
    kept = _kept.get(db)
    if kept is not None and time.monotonic() < kept.until:
        answer = kept.answers.get(question)
        if answer is not None:
            return answer
    return _read(db, question)


def refresh() -> None:
    """Forget all answers: the next question about each problem reads the database."""
    with _lock:
        _kept.clear()


def _read(db: Path | None, question: tuple[Any, ...]) -> Choice:
    from ctatune import choice  # late: `import ctatune` stays quick
    from ctatune.problem import Problem
    from ctatune.store import default_path

    shape, gpus, dtype, activation, output, platform = question
    with _lock:
        path = db or default_path()
        stamp = _stamp(path)
        kept = _kept.get(db)
        same = kept is not None and kept.path == path and kept.stamp == stamp
        answers = kept.answers if kept is not None and same else {}
        if question not in answers:
            problem = Problem.of(
                shape, gpus=gpus, dtype=dtype, activation=activation, output=output
            )
            answers = answers | {question: choice.choose(problem, path, platform)}
        # What changed while it was read is seen at the next look: the stamp is older than that.
        _kept[db] = _Kept(path, stamp, time.monotonic() + CHECK_SECONDS, answers)
        return answers[question]


def _stamp(path: Path) -> _Stamp:
    """The state of a database: its file and its write-ahead log, which commits go to first."""
    return tuple(_file(name) for name in (path, path.with_name(path.name + "-wal")))


def _file(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
