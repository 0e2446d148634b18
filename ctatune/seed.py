"""Measurements as JSON lines, one a row with its full identity; among them the shipped ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from ctatune.errors import StoreError
from ctatune.rooms import room
from ctatune.rows import DAMAGE, Row, Run, canonical_json, decode, warn_once
from ctatune.store import Store


class Imported(NamedTuple):
    """What became of the lines of an import."""

    added: int
    known: int
    damaged: int


def export_lines(store: Store, *, platform: str | None = None) -> Iterator[str]:
    """Every measurement as a line of canonical JSON with its full identity, in a fixed order.

    Ids, which are one database's own, are left out; predictions are never exported.
    """
    rows = store.measurements(platform=platform)
    order = {}
    for run_id, run in {row.run_id: row.run for row in rows}.items():
        order[run_id] = (run.platform.name, run.utc, canonical_json(_without_id(run)))
    rows.sort(key=lambda row: (*order[row.run_id], row.trial))
    for row in rows:
        config = json.loads(row.config.canonical())
        yield canonical_json(_without_id(row) | {"run": _without_id(row.run), "config": config})


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
                warn_once(f"{origin} line {number} is damaged, skipped: {error}")
    return Imported(added, known, damaged)


def parse_line(line: str) -> Row:
    """The row of an exported line, with ids of 0.

    Raises: one of DAMAGE when the line is damaged.
    """
    document = json.loads(line)
    return decode(Row, document | {"id": 0, "run": document["run"] | {"id": 0}})


def load_seed() -> Store:
    """An in-memory store of the shipped measurements, `measurements/*.jsonl` of the room `db`.

    Raises: StoreError when a file cannot be read.
    """
    store = Store.memory()
    for path in sorted((room("db") / "measurements").glob("*.jsonl")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise StoreError(f"shipped measurements {path}: {error.strerror}") from error
        import_lines(store, text.splitlines(), origin=str(path))
    return store
