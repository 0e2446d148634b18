"""Measurements as JSON lines, one a row with its full identity; among them the shipped ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache
from typing import Any, NamedTuple

from ctatune.errors import StoreError
from ctatune.rooms import room
from ctatune.rows import DAMAGE, Row, Run, canonical_json, decode, warn_once
from ctatune.store import Store

# Of a shipped line; the rest of it is parsed when its shape is asked for.
_PROBLEM = re.compile(r'"problem":(\{[^{}]*\})')


class Imported(NamedTuple):
    """What became of the lines of an import."""

    added: int
    known: int
    damaged: int


def export_lines(store: Store, *, platform: str | None = None) -> Iterator[str]:
    """Every measurement as a line of canonical JSON with its full identity, in a fixed order.

    Ids, which are one database's own, are left out; predictions are never exported.
    """
    for row in sorted(store.measurements(platform=platform), key=_order):
        config = json.loads(row.config.canonical())
        yield canonical_json(_without_id(row) | {"run": _without_id(row.run), "config": config})


def _order(row: Row) -> tuple[str, str, str, int]:
    run = row.run
    return run.platform.name, run.utc, canonical_json(_without_id(run)), row.trial


def _without_id(value: Row | Run) -> dict[str, Any]:
    fields_of_value = asdict(value)
    del fields_of_value["id"]
    return fields_of_value


def import_lines(store: Store, lines: Iterable[str], *, origin: str) -> Imported:
    """Add exported lines to `store`, all in one transaction; a known row is not added twice.

    A damaged line is reported in a warning that names `origin` and the line, and skipped.
    """
    added = known = damaged = 0
    with store.transaction():
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                if store.add_row(parse_line(line)):
                    added += 1
                else:
                    known += 1
            except DAMAGE as error:
                damaged += 1
                warn_once(f"{origin} line {number} is damaged, skipped: {error!r}")
    return Imported(added, known, damaged)


def parse_line(line: str) -> Row:
    """The row of an exported line, with ids of 0.

    Raises: one of DAMAGE when the line is damaged.
    """
    document = json.loads(line)
    return decode(Row, document | {"id": 0, "run": document["run"] | {"id": 0}})


@cache
def shipped(shape: str) -> tuple[Row, ...]:
    """The shipped measurements of a shape, with ids of 0; read once, and only read by all threads.

    Raises: StoreError when a file cannot be read.
    """
    rows = []
    for origin, line in _shipped_lines().get(shape, ()):
        try:
            rows.append(parse_line(line))
        except DAMAGE as error:
            warn_once(f"{origin} is damaged, skipped: {error}")
    return tuple(rows)


def shipped_shapes() -> tuple[str, ...]:
    """The shapes of which measurements are shipped."""
    return tuple(_shipped_lines())


def shipped_rows() -> list[Row]:
    """All shipped measurements."""
    return [row for shape in shipped_shapes() for row in shipped(shape)]


@cache
def _shipped_lines() -> dict[str, list[tuple[str, str]]]:
    """The shipped lines of each shape, each with where it stands: not parsed until asked for."""
    by_shape: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((room("db") / "measurements").glob("*.jsonl")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise StoreError(f"shipped measurements {path}: {error.strerror}") from error
        for number, line in enumerate(text.splitlines(), start=1):
            origin = f"{path} line {number}"
            problem = _PROBLEM.search(line)
            try:
                sizes = json.loads(problem[1] if problem else "")
                shape = "x".join(str(sizes[name]) for name in "mkhn")
            except DAMAGE as error:
                warn_once(f"{origin} is damaged, skipped: {error}")
            else:
                by_shape.setdefault(shape, []).append((origin, line))
    return by_shape


def forget_shipped() -> None:
    """Read the shipped files anew when they are next asked for."""
    shipped.cache_clear()
    _shipped_lines.cache_clear()
