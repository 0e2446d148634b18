"""The store: every trial in one SQLite file, committed at once, readable while another writes."""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from ctatune import records
from ctatune.config import AnyConfig, digest, parse_config
from ctatune.errors import StoreError
from ctatune.problem import Problem
from ctatune.rooms import room

_log = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 10.0
# What a damaged row of the database, or line of the seed, raises when it is decoded.
DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One start of a command that measures or simulates, on one platform."""

    id: int
    utc: str
    command: str
    compiler: str
    versions: dict[str, str]
    platform: records.Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A stored measurement with its full identity; `trial` counts from 1 inside its run."""

    id: int
    trial: int
    utc: str
    protocol: int
    run: Run
    problem: Problem
    config: AnyConfig
    measurement: records.Measurement

    @property
    def kernel_hash(self) -> str | None:
        return self.measurement.kernel.hash if self.measurement.kernel else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRow:
    """A stored prediction: another type than `Row`, so that neither passes for the other."""

    id: int
    utc: str
    run: Run
    problem: Problem
    config: AnyConfig
    prediction: records.Prediction


def default_path() -> Path:
    """Where the user's database lies: `$CTATUNE_DB` or the platform's data folder."""
    chosen = os.environ.get("CTATUNE_DB")
    return Path(chosen) if chosen else platformdirs.user_data_path("ctatune") / "ctatune.db"


def migrations_folder() -> Path:
    """Where the schema changes lie, as `NNNN_name.sql`."""
    return room("db") / "migrations"


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces, one line of ASCII; nan and inf become strings."""
    return json.dumps(_finite(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


class Store:
    """Measurements and predictions of one database, for one thread; see `open` and `memory`."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        from sqlite_utils import Database  # late: imports pandas where that is installed

        self.name = name
        self._db = Database(connection, execute_plugins=False)
        self._db.execute("PRAGMA foreign_keys = ON")

    @classmethod
    def memory(cls) -> Store:
        """An empty store that is gone when it is closed."""
        store = cls(_connect(":memory:"), "in memory")
        store._migrate()
        return store

    @classmethod
    def open(cls, path: Path | str, *, create: bool = True, read_only: bool = False) -> Store:
        """The store in the file at `path`, its schema brought up to date.

        `read_only` leaves the file as it is: an older schema is brought up to date in memory.

        Raises: StoreError, in one line, when there is no such file (without `create`), when it is
        no database, a damaged one, a newer ctatune's, another program's, or cannot be written.
        """
        path = Path(path).absolute()
        with _one_line(name := f"database {path}"):
            if path.is_dir():
                raise StoreError(f"{name}: must be a file, is a folder")
            if create and not read_only:
                path.parent.mkdir(parents=True, exist_ok=True)
            else:
                path.stat()
            store = cls(_connect_read_only(path) if read_only else _connect(path.as_uri()), name)
            try:
                return store._copy_to_read() if read_only else store._ready_to_write()
            except BaseException:
                store.close()
                raise

    def _ready_to_write(self) -> Store:
        self._pending()  # refuses another program's file before anything in it changes
        self._db.enable_wal()
        with self.transaction():
            pass  # refuses a file that cannot be written: SQLite opens it without a word
        self._migrate()
        return self

    def _copy_to_read(self) -> Store:
        if not self._pending():
            return self
        copy = Store(_connect(":memory:"), self.name)
        self._db.conn.backup(copy._db.conn)
        self.close()
        copy._migrate()
        return copy

    def _pending(self) -> list[Path]:
        """Migrations that this database lacks, in their order."""
        known = {path.stem: path for path in migrations_folder().glob("*.sql")}
        tables = self._db.table_names()
        if tables and "schema_migration" not in tables:
            raise StoreError(f"{self.name}: belongs to another program (table {tables[0]!r})")
        applied = self._db.query("SELECT name FROM schema_migration") if tables else ()
        names = {row["name"] for row in applied}
        if newer := names - known.keys():
            now = max(known, default="none")
            raise StoreError(
                f"{self.name}: has schema {max(newer)}, this older ctatune knows {now}"
            )
        return [known[name] for name in sorted(known.keys() - names)]

    def _migrate(self) -> None:
        while self._pending():
            with self.transaction():
                for path in self._pending()[:1]:  # again: another process may have been faster
                    self._db.executescript(
                        "CREATE TABLE IF NOT EXISTS schema_migration (name TEXT, utc TEXT);"
                        + path.read_text(encoding="utf-8")
                    )
                    self._insert("schema_migration", {"name": path.stem, "utc": _now()})

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All writes inside, or none. Takes the write lock at once, so that it waits its turn."""
        with _one_line(self.name):
            if self._db.conn.in_transaction:
                with self._db.atomic():
                    yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.commit()
            except BaseException:
                self._db.rollback()
                raise

    def begin_run(
        self, platform: records.Platform, *, command: str, compiler: str, versions: dict[str, str]
    ) -> int:
        """A new run, to which measurements and predictions are added; returns its id."""
        run = Run(
            id=0, utc=_now(), command=command, compiler=compiler, versions=versions, platform=platform
        )
        with self.transaction():
            return self._run_id(run)

    def add_measurement(
        self, run_id: int, problem: Problem, config: AnyConfig, measurement: records.Measurement
    ) -> int:
        """Store one trial, committed when this returns; returns the row's id."""
        with self.transaction():
            last = "SELECT coalesce(max(trial), 0) FROM measurement WHERE run_id = ?"
            trial = self._db.execute(last, [run_id]).fetchone()[0] + 1
            identity = {"run_id": run_id, "trial": trial, "utc": _now()}
            identity["protocol"] = records.PROTOCOL
            return self._insert_measurement(identity, problem, config, measurement)

    def add_row(self, row: Row) -> bool:
        """Store another database's row under its own run and trial; False when it is known."""
        with self.transaction():
            run_id = self._run_id(row.run)
            known = "SELECT 1 FROM measurement WHERE run_id = ? AND trial = ?"
            if self._db.execute(known, [run_id, row.trial]).fetchone():
                return False
            identity = {"run_id": run_id, "trial": row.trial, "utc": row.utc}
            identity["protocol"] = row.protocol
            self._insert_measurement(identity, row.problem, row.config, row.measurement)
            return True

    def add_prediction(
        self, run_id: int, problem: Problem, config: AnyConfig, prediction: records.Prediction
    ) -> int:
        """Store what a model computed; returns the row's id."""
        low_us, high_us = prediction.interval_us
        with self.transaction():
            values = {"run_id": run_id, "utc": _now(), "config_key": self._config_key(config)}
            values |= {"low_us": low_us, "high_us": high_us, "model": prediction.model}
            values["latency_us"] = prediction.latency_us
            return self._insert("prediction", values | asdict(problem))

    def measurements(
        self, problem: Problem | None = None, platform: str | None = None, **equal: object
    ) -> list[Row]:
        """Measurements in the order in which they were stored; `equal` names columns."""
        rows = self._select("measured", problem, platform, equal)
        return [row for values in rows if (row := self._decoded(_row, values))]

    def predictions(
        self, problem: Problem | None = None, platform: str | None = None, **equal: object
    ) -> list[PredictionRow]:
        """Predictions in the order in which they were stored; `equal` names columns."""
        rows = self._select("predicted", problem, platform, equal)
        return [row for values in rows if (row := self._decoded(_prediction_row, values))]

    def _select(self, view: str, problem, platform, equal) -> list[dict[str, Any]]:
        ...
