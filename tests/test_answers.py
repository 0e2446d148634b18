"""Answers from memory: the same as from the database, at any time and from any thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from test_choice import OTHER, db, final, no_shipped_rows, run
from test_seed import CONFIG, PROBLEM

import ctatune
from ctatune import answers, choice
from ctatune.errors import UsageError

__all__ = ["db", "no_shipped_rows"]  # fixtures


@pytest.fixture(autouse=True)
def fresh():
    ctatune.refresh()


def ask() -> ctatune.Choice:
    return ctatune.best(PROBLEM.shape, gpus=PROBLEM.gpus)


def test_the_second_answer_is_the_first_one(db):
    run(db, (CONFIG, final(100.0)))
    assert ask() is ask()
    assert ask().latency_us == 100.0


def test_a_change_of_the_database_is_seen(db):
    run(db, (CONFIG, final(100.0)))
    assert ask().config == CONFIG
    run(db, (OTHER, final(90.0)))
    time.sleep(2 * answers.CHECK_SECONDS)
    assert ask().config == OTHER
    run(db, (CONFIG, final(80.0)))
    ctatune.refresh()
    assert ask().config == CONFIG


def test_another_database_is_another_answer(db, tmp_path, monkeypatch):
    run(db, (CONFIG, final(100.0)))
    run(tmp_path / "b.db", (OTHER, final(50.0)))
    assert ask().config == CONFIG
    assert ctatune.best(PROBLEM.shape, gpus=2, db=tmp_path / "b.db").config == OTHER
    monkeypatch.setenv("CTATUNE_DB", str(tmp_path / "b.db"))
    time.sleep(2 * answers.CHECK_SECONDS)
    assert ask().config == OTHER


@pytest.mark.usefixtures("db")
def test_an_error_is_an_error_each_time():
    for _ in range(2):
        with pytest.raises(UsageError, match="at least 1"):
            ctatune.best("0x1x1", gpus=2)


def test_eight_threads_never_see_what_was_never_stored(db):
    """The writer's races get faster, and odd latencies belong to one config, even to the other."""
    run(db, (CONFIG, final(100.0)))
    done, wrong = threading.Event(), []

    def reader() -> None:
        newest = 100.0
        while not done.is_set():
            choice = ask()
            right = choice.config == (OTHER if choice.latency_us % 2 else CONFIG)
            if not right or choice.latency_us > newest:  # each race is faster than the last one
                wrong.append(choice)
            newest = choice.latency_us

    threads = [threading.Thread(target=reader) for _ in range(8)]
    for thread in threads:
        thread.start()
    for latency_us in range(99, 79, -1):
        run(db, (OTHER if latency_us % 2 else CONFIG, final(float(latency_us))))
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    ctatune.refresh()
    assert ask().latency_us == 80.0


def test_what_is_kept_waits_for_no_new_answer(db, monkeypatch):
    run(db, (CONFIG, final(100.0)))
    ask()  # a first look makes SQLite's files beside the database, which is a change of it
    time.sleep(2 * answers.CHECK_SECONDS)
    kept, choose, began, go_on = ask(), choice.choose, threading.Event(), threading.Event()

    def slow(*of: object, **rest: object) -> ctatune.Choice:
        began.set()
        assert go_on.wait(10)
        return choose(*of, **rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(choice, "choose", slow)
    other = threading.Thread(target=ctatune.best, args=("65x8192x8192",), kwargs={"gpus": 2})
    other.start()
    assert began.wait(10)
    time.sleep(2 * answers.CHECK_SECONDS)
    assert ask() is kept
    go_on.set()
    other.join()
    monkeypatch.setattr(choice, "choose", None)
    assert ctatune.best("65x8192x8192", gpus=2).source == "neighbour"  # kept, too


def test_a_forked_process_can_ask_though_its_parent_was_computing(db):
    run(db, (CONFIG, final(100.0)))
    ask()
    with answers._computing, answers._lock:
        pid = os.fork()
        if pid == 0:
            try:
                ctatune.best("3x512x512", gpus=2)
                os._exit(0)
            finally:
                os._exit(1)
    end = time.monotonic() + 30.0
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(pid, signal.SIGKILL)
    assert done == (pid, 0)


def test_a_database_may_be_named_by_a_string(db):
    run(db, (CONFIG, final(100.0)))
    assert ctatune.best(PROBLEM.shape, gpus=2, db=str(db)).config == CONFIG


def test_a_measured_answer_needs_no_numpy(db):
    run(db, (CONFIG, final(100.0)))
    code = "import sys, ctatune; ctatune.best('64x8192x8192', gpus=2); print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    for heavy in ("numpy", "sqlite_utils", "cuda", "optuna", "scipy"):
        assert f"'{heavy}'" not in loaded


def test_the_import_is_light():
    code = "import sys, ctatune; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    for heavy in ("numpy", "sqlite3", "cuda", "optuna", "scipy", "click", "ctatune.choice"):
        assert f"'{heavy}'" not in loaded
