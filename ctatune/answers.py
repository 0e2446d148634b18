"""Answers in microseconds: what `best` said is kept until the user's database changes.

A serving engine asks thousands of times a second. The first question about a problem reads the
database, and may have to compute; every later one is a look into a dict that is never changed in
place, and waits for nobody who computes.
"""

from __future__ import annotations

import os
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


_lock = threading.Lock()  # of `_kept`, held for microseconds
_computing = threading.Lock()  # one thread at a time makes a new answer
_kept: dict[Path | str | None, _Kept] = {}


def _renew_locks() -> None:
    """In a forked process, whose parent's threads may have held them."""
    global _lock, _computing
    _lock, _computing = threading.Lock(), threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def best(
    shape: str,
    *,
    gpus: int,
    dtype: str = "bf16",
    activation: str = "none",
    output: str = "replicated",
    db: Path | str | None = None,
    platform: str | None = None,
    ours: bool = False,
) -> Choice:
    """The fastest config known for a problem (`choice.choose` says how), from memory if it can be.

    With `ours` it is one of our kernel, which `Mlp` runs, where a baseline is faster too.

    Thread-safe. A change of the database, by whatever process, is seen after CHECK_SECONDS at
    most; `refresh` sees it at once.

    Raises: NoAnswer; UsageError for an impossible problem; StoreError for a damaged database.
    """
    question = (shape, gpus, dtype, activation, output, platform, ours)
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


def _read(db: Path | str | None, question: tuple[Any, ...]) -> Choice:
    from ctatune import choice  # late: `import ctatune` stays quick
    from ctatune.problem import Problem
    from ctatune.store import default_path

    path = Path(db) if db else default_path()
    found = _looked(db, path).answers.get(question)
    if found is not None:
        return found
    with _computing:
        kept = _looked(db, path)
        if question in kept.answers:
            return kept.answers[question]
        shape, gpus, dtype, activation, output, platform, ours = question
        problem = Problem.of(shape, gpus=gpus, dtype=dtype, activation=activation, output=output)
        answer = choice.choose(problem, path, platform, ours=ours)
        with _lock:  # what changed while it was read is seen at the next look: the stamp is older
            now = _kept.get(db)
            if now is not None and now.answers is kept.answers:
                _kept[db] = now._replace(answers=kept.answers | {question: answer})
        return answer


def _looked(db: Path | str | None, path: Path) -> _Kept:
    """What is kept of a database after a look at it."""
    with _lock:
        stamp, kept = _stamp(path), _kept.get(db)
        until = time.monotonic() + CHECK_SECONDS
        if kept is not None and (kept.path, kept.stamp) == (path, stamp):
            _kept[db] = kept._replace(until=until)
        else:
            _kept[db] = _Kept(path, stamp, until, {})
        return _kept[db]


def _stamp(path: Path) -> _Stamp:
    """The state of a database: its file and its write-ahead log, which commits go to first."""
    return tuple(_file(name) for name in (path, Path(f"{path}-wal")))


def _file(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
