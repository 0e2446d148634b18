"""The store: every trial in one SQLite file, committed at once, readable while another writes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import platformdirs

from ctatune import rows as rowforms
from ctatune.config import AnyConfig, digest
from ctatune.errors import StoreError
from ctatune.problem import Problem
from ctatune.records import Measurement, Platform, Prediction, protocol_of
from ctatune.rooms import room
from ctatune.rows import PredictionRow, Row, Run

if TYPE_CHECKING:
    from sqlite_utils import Database

_AnyRow = TypeVar("_AnyRow", Row, PredictionRow)
BUSY_TIMEOUT_S = 10.0
# The DELETE fails where the file can only be read: SQLite opens it to write without a word.
_MIGRATIONS = """CREATE TABLE IF NOT EXISTS schema_migration (name TEXT PRIMARY KEY, utc TEXT);
    DELETE FROM schema_migration WHERE 0;"""


def default_path() -> Path:
    """Where the user's database lies: `$CTATUNE_DB` or the platform's data folder."""
    chosen = os.environ.get("CTATUNE_DB")
    return Path(chosen or platformdirs.user_data_path("ctatune") / "ctatune.db")


class Store(AbstractContextManager["Store"]):
    """Measurements and predictions of one database, for one thread; see `open` and `memory`."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self.name, self._connection = name, connection
        connection.execute("PRAGMA foreign_keys = ON")

    @cached_property
    def _db(self) -> Database:
        """For writing. It imports NumPy, and pandas where that is installed: 0.1 s and more, which
        a look-up does not have."""
        from sqlite_utils import Database

        return Database(self._connection, execute_plugins=False)

    @classmethod
    def memory(cls) -> Store:
        """An empty store that is gone when it is closed."""
        return cls(_connect(":memory:"), "in memory")._migrate()

    @classmethod
    def open(cls, path: Path | str, *, read_only: bool = False) -> Store:
        """The store in the file at `path`, its schema brought up to date.

        `read_only` leaves the file as it is: an older schema is brought up to date in memory.

        Raises: StoreError, in one line, when there is no such file (to read only), when it is
        no database, a damaged one, a newer ctatune's, another program's, or cannot be written.
        """
        path = Path(path).absolute()
        with _one_line(name := f"database {path}"):
            if path.is_dir():
                raise StoreError(f"{name}: must be a file, is a folder")
            if read_only:
                path.stat()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
            store = cls(_connect_read_only(path) if read_only else _connect(path.as_uri()), name)
            try:
                return store._ready_to_read() if read_only else store._ready_to_write()
            except BaseException:
                store.close()
                raise

    def _ready_to_write(self) -> Store:
        self._pending()  # refuses another program's file before anything in it changes
        self._db.enable_wal()
        return self._migrate()

    def _ready_to_read(self) -> Store:
        if not self._pending():
            return self
        copy = Store(_connect(":memory:"), self.name)
        self._connection.backup(copy._connection)
        self.close()
        return copy._migrate()

    def _pending(self) -> list[Path]:
        """Migrations that this database lacks, in their order."""
        known = {path.stem: path for path in (room("db") / "migrations").glob("*.sql")}
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        tables = [row["name"] for row in self._read(query)]
        if tables and "schema_migration" not in tables:
            raise StoreError(f"{self.name}: belongs to another program (table {tables[0]!r})")
        applied = self._read("SELECT name FROM schema_migration") if tables else ()
        names = {row["name"] for row in applied}
        if newer := names - known.keys():
            raise StoreError(f"{self.name}: schema {max(map(str, newer))} needs a newer ctatune")
        return [known[name] for name in sorted(known.keys() - names)]

    def _migrate(self) -> Store:
        while True:
            with self.transaction():
                pending = self._pending()
                self._db.executescript(_MIGRATIONS)
                for path in pending[:1]:
                    self._db.executescript(path.read_text(encoding="utf-8"))
                    self._insert("schema_migration", {"name": path.stem, "utc": _now()})
            if not pending[1:]:
                return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

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
        self, platform: Platform, *, command: str, compiler: str, versions: dict[str, str]
    ) -> int:
        """A new run, to which measurements and predictions are added; returns its id."""
        with self.transaction():
            rest: dict[str, Any] = {"command": command, "compiler": compiler}
            return self._run_id(Run(id=0, utc=_now(), platform=platform, versions=versions, **rest))

    def add_measurement(
        self, run_id: int, problem: Problem, config: AnyConfig, measurement: Measurement
    ) -> int:
        """Store one trial, committed when this returns; returns the row's id."""
        with self.transaction():
            next_trial = "SELECT coalesce(max(trial), 0) + 1 FROM measurement WHERE run_id = ?"
            trial = self._db.execute(next_trial, [run_id]).fetchone()[0]
            place: dict[str, Any] = {"run_id": run_id, "trial": trial, "utc": _now()}
            place["protocol"] = protocol_of(measurement.phase)
            return self._insert_measurement(place, problem, config, measurement)

    def add_row(self, row: Row) -> bool:
        """Store another database's row under its own run and trial; False when it is known."""
        with self.transaction():
            place: dict[str, Any] = {"run_id": self._run_id(row.run), "trial": row.trial}
            if self._id("measurement", place):
                return False
            place |= {"utc": row.utc, "protocol": row.protocol}
            self._insert_measurement(place, row.problem, row.config, row.measurement)
            return True

    def _insert_measurement(
        self, place: dict[str, Any], problem: Problem, config: AnyConfig, measurement: Measurement
    ) -> int:
        kernel, verification = measurement.kernel, measurement.verification
        row = place | asdict(problem) | rowforms.columns(measurement)
        row["config_key"] = self._config_key(config)
        row["kernel_id"] = kernel and self._intern("kernel", asdict(kernel))
        row_id = self._insert("measurement", row)
        if verification:
            self._insert("verification", {"measurement_id": row_id, **asdict(verification)})
        return row_id

    def add_prediction(
        self, run_id: int, problem: Problem, config: AnyConfig, prediction: Prediction
    ) -> int:
        """Store what a model computed; returns the row's id."""
        with self.transaction():
            row = {"run_id": run_id, "utc": _now(), "config_key": self._config_key(config)}
            return self._insert("prediction", row | asdict(problem) | rowforms.columns(prediction))

    def measurements(
        self, problem: Problem | None = None, platform: str | None = None, **equal: object
    ) -> list[Row]:
        """Measurements in stored order; `equal` are columns. A damaged row is left out."""
        where = equal | (asdict(problem) if problem else {})
        return self._rows(Row, "measurement", platform, where)

    def predictions(
        self, problem: Problem | None = None, platform: str | None = None, **equal: object
    ) -> list[PredictionRow]:
        """Predictions, in the same way."""
        where = equal | (asdict(problem) if problem else {})
        return self._rows(PredictionRow, "prediction", platform, where)

    def _rows(
        self, kind: type[_AnyRow], table: str, platform: str | None, where: dict[str, Any]
    ) -> list[_AnyRow]:
        query = f"""SELECT * FROM {table}_row
            WHERE id IN (SELECT id FROM {table} WHERE {_equal(where)})
            AND coalesce("run.platform.name" = ?, 1) ORDER BY id"""
        rows = []
        with _one_line(self.name):
            for values in self._read(query, [*where.values(), platform]):
                try:
                    rows.append(rowforms.decode(kind, rowforms.document(values)))
                except rowforms.DAMAGE as error:
                    rowforms.warn_once(
                        f"{self.name}: row {values['id']} of {table} is damaged: {error}"
                    )
        return rows

    def platforms(self, gpus: int = 1) -> list[Platform]:
        """Platforms of so many GPUs or more on which something is measured, the one that was used
        last first; each as it was then."""
        names = [field.name for field in fields(Platform)]
        columns = ", ".join(f'"run.platform.{name}"' for name in names)
        query = f"""SELECT {columns}, max("run.utc") FROM measurement_row
            WHERE "run.platform.gpus" >= ? GROUP BY "run.platform.name"
            ORDER BY max("run.utc") DESC"""
        found = []
        with _one_line(self.name):
            for values in self._connection.execute(query, [gpus]):
                with suppress(*rowforms.DAMAGE):  # reported when its rows are read
                    row = dict(zip(names, values[:-1], strict=True))
                    found.append(rowforms.decode(Platform, row))
        return found

    def _read(self, query: str, values: Sequence[Any] = ()) -> Iterator[dict[str, Any]]:
        """Rows by the names of their columns."""
        cursor = self._connection.execute(query, values)
        names = [name for name, *_ in cursor.description]
        return (dict(zip(names, row, strict=True)) for row in cursor)

    def _config_key(self, config: AnyConfig) -> str:
        row = {"canonical": config.canonical(), "method": config.method}
        row["key"] = digest(row["canonical"])
        self._intern("config", row)
        return row["key"]

    def _run_id(self, run: Run) -> int:
        row = {"platform_id": self._intern("platform", asdict(run.platform)), "utc": run.utc}
        row |= {"command": run.command, "compiler": run.compiler}
        return self._intern("run", row | {"versions": rowforms.canonical_json(run.versions)})

    def _intern(self, table: str, row: dict[str, Any]) -> int:
        """The id of the row with these columns, its natural key; inserted when it is new."""
        return self._id(table, row) or self._insert(table, row)

    def _id(self, table: str, row: dict[str, Any]) -> int | None:
        query = f"SELECT rowid FROM {table} WHERE {_equal(row)}"
        return next((found for (found,) in self._db.execute(query, list(row.values()))), None)

    def _insert(self, table: str, row: dict[str, Any]) -> int:
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        statement = f"INSERT INTO {table} ({names}) VALUES ({marks})"
        return self._db.execute(statement, list(row.values())).lastrowid or 0


def _equal(columns: dict[str, Any]) -> str:
    return " AND ".join(f"{name} = ?" for name in columns) or "1"


def _connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    connection.text_factory = lambda text: text.decode(errors="replace")  # one bad byte, one row
    return connection


def _connect_read_only(path: Path) -> sqlite3.Connection:
    uri = f"{path.as_uri()}?mode=ro"
    connection = _connect(uri)
    try:
        connection.execute("SELECT 1 FROM sqlite_master")
    except sqlite3.OperationalError:
        # WAL writes beside the file, here it may not; with no log left the file alone is whole.
        connection.close()
        if (log := Path(f"{path}-wal")).exists() and log.stat().st_size:
            raise
        return _connect(f"{uri}&immutable=1")
    return connection


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turns what SQLite and the file system raise into one line for a person."""
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{name}: {getattr(error, 'strerror', None) or error}") from error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
