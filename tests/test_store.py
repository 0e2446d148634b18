"""The store: what goes in comes out, what is damaged is refused in one line, nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from test_seed import CONFIG, GOOD, PLATFORM, PROBLEM, begin

import ctatune.store
from ctatune.config import Baseline
from ctatune.errors import StoreError
from ctatune.records import SCREENING, Measurement, Prediction
from ctatune.rooms import room
from ctatune.store import Store

HERE = Path(__file__).resolve().parent
NOBODY = 65534


def filled(path: Path, trials: int = 3) -> Path:
    with Store.open(path) as store:
        run = begin(store)
        for _ in range(trials):
            store.add_measurement(run, PROBLEM, CONFIG, GOOD)
    return path


def test_a_prediction_is_no_measurement():
    predicted = Prediction(latency_us=1.0, interval_us=(1.0, 1.0), model="simulator-1")
    with Store.memory() as store:
        store.add_prediction(begin(store), PROBLEM, CONFIG, predicted)
        assert store.measurements() == store.platforms() == []


def test_rows_are_selected_by_problem_platform_and_column():
    other = replace(PROBLEM, m=1)
    with Store.memory() as store:
        run = begin(store)
        first = store.add_measurement(run, PROBLEM, CONFIG, GOOD)
        second = store.add_measurement(run, other, Baseline(), Measurement(outcome="timeout"))
        assert [row.id for row in store.measurements()] == [first, second]
        assert [row.id for row in store.measurements(PROBLEM)] == [first]
        (row,) = store.measurements(outcome="timeout", protocol=SCREENING)
        assert row.id == second
        assert [row.trial for row in store.measurements(platform="box")] == [1, 2]
        assert store.measurements(platform="elsewhere") == []
        with pytest.raises(StoreError, match="no such column: colour"):
            store.measurements(colour="red")


def test_known_platforms_configs_and_kernels_are_not_stored_twice(tmp_path):
    filled(tmp_path / "a.db")
    filled(tmp_path / "a.db")
    with sqlite3.connect(tmp_path / "a.db") as raw:
        for table, rows in (("platform", 1), ("config", 1), ("kernel", 1), ("run", 2)):
            assert raw.execute(f"SELECT count(*) FROM {table}").fetchone() == (rows,)
        with Store.open(tmp_path / "a.db") as store:
            begin(store, replace(PLATFORM, driver="another"))
        assert raw.execute("SELECT count(*) FROM platform").fetchone() == (2,)


def test_a_row_needs_its_run_and_fails_whole():
    with Store.memory() as store:
        with pytest.raises(StoreError, match="FOREIGN KEY"):
            store.add_measurement(99, PROBLEM, CONFIG, GOOD)
        assert store.measurements() == []
        assert store._db.execute("SELECT count(*) FROM config").fetchone() == (0,)


def of_text(path: Path) -> None:
    path.write_text("not a database, but long enough to be looked at\n" * 100)


def with_damaged_pages(path: Path) -> None:
    data = filled(path, trials=50).read_bytes()
    path.write_bytes(data[:100] + b"\xee" * (len(data) - 100))


def of_another_program(path: Path) -> None:
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE studies (study_id INTEGER)")


def of_a_newer_ctatune(path: Path) -> None:
    with sqlite3.connect(filled(path)) as raw:
        raw.execute("INSERT INTO schema_migration VALUES ('9999_later', 'then')")


REFUSED = {
    of_text: "not a database",
    with_damaged_pages: "malformed",
    of_another_program: "another program .*studies",
    of_a_newer_ctatune: "9999_later needs a newer ctatune",
    Path.mkdir: "must be a file, is a folder",
}


def count(path: Path, read_only: bool) -> int:
    with Store.open(path, read_only=read_only) as store:
        return len(store.measurements())


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_is_no_store_of_ours_is_refused_in_one_line(tmp_path, make, read_only):
    make(path := tmp_path / "a.db")
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StoreError, match=REFUSED[make]) as caught:
        count(path, read_only)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.is_dir() or path.read_bytes() == before


def test_what_is_not_there_is_refused_unless_it_may_be_created(tmp_path):
    path = tmp_path / "folder" / "a.db"
    with pytest.raises(StoreError, match=f"{path}: No such file"):
        Store.open(path, read_only=True)
    assert not path.parent.exists()
    Store.open(filled(path), read_only=True).close()
    with pytest.raises(StoreError, match=r"Not a directory|File exists"):
        Store.open(path / "below" / "b.db")


@pytest.fixture
def folder():
    """A folder that nobody may enter; the test then runs as nobody, since root may do anything."""
    made = Path(tempfile.mkdtemp())
    filled(made / "a.db")
    if is_root := os.geteuid() == 0:
        for path in (made, *made.iterdir()):
            os.chown(path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        if not os.access(HERE, os.X_OK, effective_ids=True):
            pytest.skip("this checkout lies in a folder that only its owner may enter")
        yield made
    finally:
        made.chmod(0o700)
        if is_root:
            os.seteuid(0)
        shutil.rmtree(made)


@pytest.mark.parametrize("folder_mode", [0o700, 0o500])
@pytest.mark.parametrize("file_mode", [0o600, 0o400])
def test_a_file_without_write_access_can_be_read(folder, folder_mode, file_mode):
    (folder / "a.db").chmod(file_mode)
    folder.chmod(folder_mode)
    with Store.open(folder / "a.db", read_only=True) as store:
        assert len(store.measurements()) == 3
        with pytest.raises(StoreError, match="readonly"):
            begin(store)
    if (folder_mode, file_mode) != (0o700, 0o600):
        with pytest.raises(StoreError, match=r"readonly|unable to open"):
            Store.open(folder / "a.db")


@pytest.mark.parametrize("read_only", [False, True])
def test_files_and_folders_out_of_reach_are_refused(folder, read_only):
    for path, why in ((folder / "a.db", "unable to open"), (folder, "Permission denied")):
        path.chmod(0)
        with pytest.raises(StoreError, match=why):
            Store.open(folder / "a.db", read_only=read_only)


def test_a_damaged_row_is_reported_once_and_left_out(tmp_path, caplog):
    path = filled(tmp_path / "a.db")
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE measurement SET samples_us = '[1.0,' WHERE id = 1")
        raw.execute("UPDATE measurement SET protocol = 'one' WHERE id = 2")
    with Store.open(path) as store:
        assert [row.id for row in store.measurements() + store.measurements()] == [3, 3]
    assert [message.count("is damaged") for message in caplog.messages] == [1, 1]


@pytest.fixture
def second_migration(tmp_path, monkeypatch):
    """Writes a migration 0003 beside the real ones, as a later ctatune would have it."""

    def write(sql: str) -> None:
        later = tmp_path / "later"
        shutil.copytree(room("db") / "migrations", later / "migrations")
        (later / "migrations" / "0003_later.sql").write_text(sql)
        monkeypatch.setattr(ctatune.store, "room", lambda _: later)

    return write


def test_an_older_schema_is_brought_up_to_date(tmp_path, second_migration):
    path = filled(tmp_path / "a.db")
    second_migration("CREATE TABLE a (b TEXT); INSERT INTO a VALUES ('x;y');")
    before = path.read_bytes()
    with Store.open(path, read_only=True) as store:  # in a copy
        assert store._db.execute("SELECT b FROM a").fetchone() == ("x;y",)
        assert len(store.measurements()) == 3
    assert path.read_bytes() == before
    for _ in range(2):
        with Store.open(path) as store:
            assert len(store.measurements()) == 3
        with sqlite3.connect(path) as raw:
            names = raw.execute("SELECT name FROM schema_migration ORDER BY 1").fetchall()
        assert names == [("0001_initial",), ("0002_control",), ("0003_later",)]


def test_the_second_migration_keeps_all_rows_and_allows_controls(tmp_path, monkeypatch):
    first = tmp_path / "first" / "migrations"
    first.mkdir(parents=True)
    shutil.copy(room("db") / "migrations" / "0001_initial.sql", first)
    with monkeypatch.context() as patched:
        patched.setattr(ctatune.store, "room", lambda _: first.parent)
        filled(tmp_path / "a.db")
        with Store.open(tmp_path / "a.db") as store:
            before = store.measurements()
            with pytest.raises(StoreError, match="CHECK"):
                store.add_measurement(1, PROBLEM, CONFIG, replace(GOOD, phase="control"))
    with Store.open(tmp_path / "a.db") as store:
        assert store.measurements() == before
        store.add_measurement(1, PROBLEM, CONFIG, replace(GOOD, phase="control"))
        assert [row.measurement.phase for row in store.measurements()][-1] == "control"
        assert not store._db.execute("PRAGMA foreign_key_check").fetchall()
        tables = store._db.table_names()
    with Store.memory() as fresh:
        assert sorted(tables) == sorted(fresh._db.table_names())


def test_the_second_migration_leaves_behind_only_what_breaks_a_rule(tmp_path, monkeypatch):
    first = tmp_path / "first" / "migrations"
    first.mkdir(parents=True)
    shutil.copy(room("db") / "migrations" / "0001_initial.sql", first)
    path = tmp_path / "a.db"
    with monkeypatch.context() as patched:
        patched.setattr(ctatune.store, "room", lambda _: first.parent)
        for _ in range(2):
            filled(path)
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE VIEW mine AS SELECT * FROM measurement_row")
        raw.execute("DELETE FROM run WHERE id = 1")
        raw.execute("PRAGMA ignore_check_constraints = ON")
        raw.execute("UPDATE measurement SET phase = 'fnal' WHERE id = 4")
    for read_only in (True, False):
        with Store.open(path, read_only=read_only) as store:
            assert [row.id for row in store.measurements()] == [5, 6]
            assert store._db.execute("SELECT count(*) FROM mine").fetchone() == (2,)
            assert store._db.execute("SELECT count(*) FROM verification").fetchone() == (2,)
            assert not store._db.execute("PRAGMA foreign_key_check").fetchall()


def test_a_migration_that_fails_leaves_nothing(tmp_path, second_migration):
    path = filled(tmp_path / "a.db")
    second_migration("CREATE TABLE a (b TEXT); INSERT INTO nowhere VALUES (1);")
    with pytest.raises(StoreError, match="no such table: nowhere"):
        Store.open(path)
    with sqlite3.connect(path) as raw:
        names = raw.execute("SELECT name FROM schema_migration ORDER BY 1").fetchall()
        assert names == [("0001_initial",), ("0002_control",)]
        assert raw.execute("SELECT 1 FROM sqlite_master WHERE name = 'a'").fetchone() is None


WRITER = """
import sys
from test_store import *
with Store.open(sys.argv[1]) as store:
    run = begin(store)
    for number in range(int(sys.argv[2])):
        print(store.add_measurement(run, PROBLEM, CONFIG, GOOD), flush=True)
"""


def writer(path: Path, trials: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(trials)]
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("trials", [1, 20])
def test_a_kill_loses_at_most_the_trial_in_flight(tmp_path, trials):
    path = tmp_path / "a.db"
    with writer(path, 1_000_000) as child:
        assert child.stdout
        for _ in range(trials):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        told = trials + len([line for line in child.stdout if line.endswith("\n")])
    with Store.open(path) as store:
        rows = store.measurements()
        assert len(rows) in (told, told + 1)
        assert all(row.measurement == GOOD for row in rows)
        store.add_measurement(rows[0].run_id, PROBLEM, CONFIG, GOOD)
    with sqlite3.connect(path) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_several_write_and_one_reads_at_the_same_time(tmp_path):
    path, trials = tmp_path / "a.db", 60
    children = [writer(path, trials) for _ in range(3)]  # all of them create the file
    seen = []
    while any(child.poll() is None for child in children):
        if path.exists():
            with Store.open(path, read_only=True) as store:
                seen.append(len(store.measurements()))
    assert [child.communicate() and child.returncode for child in children] == [0, 0, 0]
    assert seen == sorted(seen)
    with Store.open(path, read_only=True) as store:
        rows = store.measurements()
    assert sorted(row.trial for row in rows) == sorted([*range(1, trials + 1)] * 3)


def test_a_lock_that_is_held_too_long_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(ctatune.store, "BUSY_TIMEOUT_S", 0.05)
    path = filled(tmp_path / "a.db")
    with Store.open(path) as one, Store.open(path) as other:
        with one.transaction(), pytest.raises(StoreError, match="database is locked"):
            begin(other)
        begin(other)
