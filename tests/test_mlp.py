"""ctatune.Mlp without GPUs: what it refuses, what it enqueues and in which order, what it keeps."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import FakeArena, FakeDriver, FakeGpus, FakeKernel, OnGpu, as_map

import ctatune
from ctatune import arrays, launch, mlp, placement, shared
from ctatune.errors import DeviceError, PipelineTimeoutError, UsageError
from ctatune.shared import Shared

K, H, N, MOST = 128, 768, 512, 600
W_UP, W_DOWN = np.zeros((H, K), np.uint16), np.zeros((N, H), np.uint16)
X, OUT = 1 << 40, 2 << 40  # where callers have theirs
NO_DB = Path("/nonexistent/ctatune.db")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def machine(monkeypatch) -> Any:
    """Two fake GPUs and the log of what is enqueued on them."""
    log: list[tuple[Any, ...]] = []
    driver = FakeDriver(shared.driver, log, cuStreamIsCapturing=0)
    monkeypatch.setattr(shared, "driver", driver)
    monkeypatch.setattr(shared, "Kernel", FakeKernel)
    monkeypatch.setattr(launch, "tensor_map", as_map)
    monkeypatch.setattr(placement, "Arena", FakeArena)
    FakeArena.live.clear()
    gpus: Any = FakeGpus(2, log)
    whole = Shared(gpus)
    monkeypatch.setattr(mlp, "shared", lambda _: whole)
    return SimpleNamespace(log=log, driver=driver, gpus=gpus, shared=whole)


def made(**rest: Any) -> ctatune.Mlp:
    return ctatune.Mlp(W_UP, W_DOWN, gpus=2, max_m=MOST, db=NO_DB, **rest)


def x_of(m: int = 64, gpu: int = 0, pointer: int = X, k: int = K) -> OnGpu:
    return OnGpu((m, k), pointer + gpu * (1 << 30), gpu)


def enqueued(log: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Launches, records and waits of a log: what, and on which stream."""
    found = []
    for name, *args in log:
        if name == "cuLaunchKernelEx":
            found.append((args[1], int(args[0].hStream)))
        elif name == "cuEventRecord":
            found.append((f"record {args[0]}", args[1]))
        elif name == "cuStreamWaitEvent":
            found.append((f"wait {args[1]}", args[0]))
    return found


def call(machine: Any, it: ctatune.Mlp, *args: Any, **named: Any) -> list[tuple[Any, ...]]:
    machine.log.clear()
    it(*args, **named)
    return enqueued(machine.log)


def events(machine: Any, captured: bool = False) -> tuple[Any, ...]:
    lanes = machine.shared._captured if captured else machine.shared._eager
    return lanes.begun, *lanes.ended


def test_each_gpu_gets_its_rows_of_the_weights(machine):
    made()
    copies = [entry[2:] for entry in machine.log if entry[0] == "copy"]
    up, down = W_UP.ctypes.data, W_DOWN.ctypes.data
    assert copies == [
        (up, 512 * K * 2, 100),
        (up + 512 * K * 2, 256 * K * 2, 101),
        (down, 256 * H * 2, 100),
        (down + 256 * H * 2, 256 * H * 2, 101),
    ]


def test_x_on_one_gpu_is_one_piece_of_work_on_the_callers_stream(machine):
    it = made()
    it(x_of(), stream=7)
    begun, ended0, ended1 = events(machine)
    assert call(machine, it, x_of(), stream=7) == [
        (f"record {begun}", 7),
        (f"wait {begun}", 101),
        ("pull", 101),
        ("mlp early", 101),
        (f"record {ended1}", 101),
        ("mlp early", 7),
        (f"wait {ended1}", 7),
        (f"record {ended0}", 7),
    ]


def test_x_on_every_gpu_takes_each_callers_stream_and_nothing_else(machine):
    it = made()
    both = [x_of(gpu=0), x_of(gpu=1)]
    it(both, stream=[7, 8])
    _, ended0, ended1 = events(machine)
    assert call(machine, it, both, stream=[7, 8]) == [
        ("mlp early", 7),
        (f"record {ended0}", 7),
        ("mlp early", 8),
        (f"record {ended1}", 8),
    ]


def test_a_call_on_another_stream_waits_for_the_one_before_on_each_gpu(machine):
    first, second = made(), made()  # all objects of a process are one sequence
    first(x_of(), stream=7)
    _, ended0, ended1 = events(machine)
    assert call(machine, second, x_of(), stream=9)[0] == (f"wait {ended0}", 9)
    found = call(machine, first, [x_of(gpu=0), x_of(gpu=1)], stream=[9, 8])
    assert found[:2] == [(f"wait {ended1}", 8), ("mlp early", 9)]
    assert found[3] == ("mlp early", 8)


def test_a_captured_call_takes_streams_and_events_of_its_own(machine):
    it = made()
    it.warm_up(64)
    machine.driver.answers["cuStreamIsCapturing"] = shared._ACTIVE
    begun, _, ended1 = events(machine, captured=True)
    last = list(machine.shared._last)
    assert call(machine, it, x_of(), stream=7) == [
        (f"record {begun}", 7),
        (f"wait {begun}", 201),
        ("pull", 201),
        ("mlp", 201),
        (f"record {ended1}", 201),
        ("mlp", 7),
        (f"wait {ended1}", 7),
    ]
    assert not {begun, ended1} & set(events(machine))
    assert machine.shared._last == last  # a replay is no call that the host knows of
    with pytest.raises(UsageError, match=r"call warm_up\(65\) before a capture"):
        it(x_of(65), stream=7)


def test_a_capture_of_one_gpu_alone_is_refused(machine, monkeypatch):
    it = made()
    active = shared._ACTIVE
    asked = iter([active, 0])
    monkeypatch.setattr(
        machine.driver, "cuStreamIsCapturing", lambda _: (active.__class__(0), next(asked)), False
    )
    monkeypatch.setattr(shared, "check", lambda result: result[-1])
    with pytest.raises(UsageError, match="all GPUs must take part in a capture, or none"):
        it([x_of(gpu=0), x_of(gpu=1)], stream=[7, 8])


def blocks(machine: Any) -> dict[int, Any]:
    """Parameter blocks of the last call, by GPU: in the order of launches the last one is 0."""
    launched = [entry for entry in machine.log if entry[0] == "cuLaunchKernelEx"]
    found = [block for _, _, name, block, _ in launched if name != "pull"]
    return {(gpu + 1) % len(found): block for gpu, block in enumerate(found)}


def test_blocks_lead_to_the_callers_x_and_y2_and_to_our_own_elsewhere(machine):
    it = made()
    call(machine, it, x_of(), OnGpu((64, N), OUT), stream=7)
    found, own = blocks(machine), it._placement._own
    rows = 64
    assert found[0]["x"] == as_map(X, (64, K), rows)
    assert found[1]["x"] == as_map(own.x[1], (64, K), rows)
    assert found[0]["y2_to"][:2].tolist() == [OUT, own.y2[1]]  # the nearest first
    assert found[1]["y2_to"][:2].tolist() == [own.y2[1], OUT]
    (pull,) = [entry for entry in machine.log if entry[2:3] == ("pull",)]
    bound = next(iter(it._placement._ready[64].bound.values()))
    assert pull[3] == bound.pulls[1].address
    assert bound.pulls[1].block.tolist() == [own.x[1], X, 64 * K * 2 // 16]


def test_schedules_share_y1_and_errors_and_no_counter(machine):
    it = made()
    seen: dict[int, Any] = {}
    for m in (1, 64, 300):
        call(machine, it, x_of(m), stream=7)
        seen[m] = blocks(machine)
    for gpu in (0, 1):
        of_gpu = [found[gpu] for found in seen.values()]
        assert len({p["y1_to"].tobytes() for p in of_gpu}) == 1
        assert len({int(p["error"]) for p in of_gpu}) == 1
        for flag in ("panels", "started", "arrived", "calls"):
            assert len({int(p[flag]) for p in of_gpu}) == 3
        for p in of_gpu:
            assert int(p["arrivals"]) == 132  # a kernel ends when its peer has stored all of Y2


def test_a_call_allocates_nothing_after_the_first(machine):
    it = made()
    it.warm_up(*range(1, 20))
    given = FakeArena.given
    for i in range(200):
        it(x_of(1 + i % 19, pointer=X + 4096 * (i % 7)), stream=7)
    assert FakeArena.given == given
    assert Counter(name for name, *_ in machine.log)["cuMemAlloc"] == 0


@pytest.mark.usefixtures("machine")
def test_an_output_is_ours_until_the_next_call_or_the_callers():
    it = made()
    y = it(x_of(), stream=7)
    assert y.shape == (64, N)
    assert y.__dlpack_device__() == (2, 0)
    assert it(x_of(), stream=7) is y
    out = OnGpu((64, N), OUT)
    assert it(x_of(), out, stream=7) is out
    ys = it([x_of(gpu=0), x_of(gpu=1)], stream=[7, 8])
    assert [y.view.gpu for y in ys] == [0, 1]
    outs = [OnGpu((64, N), OUT, 0), OnGpu((64, N), OUT + 4096 * 512, 1)]
    assert it([x_of(gpu=0), x_of(gpu=1)], outs, stream=[7, 8]) == outs


REFUSED = {
    "host": (lambda: ([np.zeros((64, K), np.uint16)],), "x must lie on GPU 0, it lies on the host"),
    "wrong gpu": (lambda: ([x_of(gpu=1)],), "x must lie on GPU 0, it lies on GPU 1"),
    "float": (lambda: ([OnGpu((64, K), X, code=2)],), "x must be bf16"),
    "width": (lambda: ([x_of(k=64)],), "x must be m x 128, got 64 x 64"),
    "one row": (lambda: ([OnGpu((K,), X)],), "x must be m x 128, got 128"),
    "too many": (lambda: ([x_of(601)],), r"m must be between 1 and 600 \(max_m\), got 601"),
    "none": (lambda: ([x_of(0)],), "m must be between 1 and 600"),
    "unaligned": (lambda: ([x_of(pointer=X + 8)],), "x must begin at a multiple of 16 bytes"),
    "no array": (lambda: ([3.0],), "x must be an array"),
    "out rows": (lambda: ([x_of(), OnGpu((63, N), OUT)],), "out must be 64 x 512, got 63 x 512"),
    "out gpu": (lambda: ([x_of(), OnGpu((64, N), OUT, 1)],), "out must lie on GPU 0"),
    "overlap": (lambda: ([x_of(), OnGpu((64, N), X + 256)],), "x and out must not overlap"),
    "one of two": (lambda: ([[x_of()]], {}), "x needs one item for each of 2 GPUs, got 1"),
    "tokens": (
        lambda: ([[x_of(), x_of(65, 1)]], {"stream": [7, 8]}),
        "x must be 64 x 128, got 65 x 128",
    ),
    "one stream": (
        lambda: ([[x_of(), x_of(gpu=1)]], {"stream": 7}),
        "stream needs one item for each of 2 GPUs, got 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_call_refuses_is_said_before_anything_is_enqueued(machine, name):
    make, message = REFUSED[name]
    args, *named = make()
    it = made()
    machine.log.clear()
    with pytest.raises(UsageError, match=message):
        it(*args, **(named[0] if named else {"stream": 7}))
    assert enqueued(machine.log) == []


@pytest.mark.usefixtures("machine")
def test_the_y_of_an_object_is_no_x_of_the_same():
    square = ctatune.Mlp(np.zeros((H, N), np.uint16), W_DOWN, gpus=2, max_m=MOST, db=NO_DB)
    y = square(x_of(k=N), stream=7)
    with pytest.raises(UsageError, match="nor may x be the y of the same Mlp"):
        square(y, stream=7)


WRONG = {
    "sizes": ((W_UP, W_UP), {"gpus": 2}, r"w_up must be h x k and w_down n x h, got 768 x 128 and"),
    "dtype": ((W_UP.astype(np.float32), W_DOWN), {"gpus": 2}, "w_up must be bf16"),
    "strided": ((W_UP, W_DOWN[:, ::2]), {"gpus": 2}, "w_down must be contiguous"),
    "no gpus": ((W_UP, W_DOWN), {}, r"say how many gpus \(1 \.\. 8\)"),
    "gpus": ((W_UP, W_DOWN), {"gpus": 9}, "gpus must be between 1 and 8"),
    "k": ((W_UP[:, :100].copy(), W_DOWN), {"gpus": 2}, "k must be a multiple of 8"),
    "far": ((OnGpu((H, K), X, 2), W_DOWN), {"gpus": 2}, "w_up must lie on the host or one of 2"),
}


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", WRONG)
def test_weights_that_cannot_be(name):
    weights, rest, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        ctatune.Mlp(*weights, **rest)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("shape", "rest", "message"),
    [
        ("64x128x768x256", {}, "the choice is for 64x128x768x256, the weights have"),
        ("64x128x768x512", {"gpus": 1}, "the choice is for 2 GPUs, gpus is 1"),
        ("64x128x768x512", {"max_m": 63}, "max_m must be at least 64"),
    ],
)
def test_a_choice_that_does_not_fit(shape, rest, message):
    choice = ctatune.best(shape, gpus=2, db=NO_DB)
    with pytest.raises(UsageError, match=message):
        ctatune.Mlp(W_UP, W_DOWN, choice, **rest)
    fitting = ctatune.best("64x128x768x512", gpus=2, db=NO_DB)
    assert ctatune.Mlp(W_UP, W_DOWN, fitting).plan(64).config == fitting.config


def test_a_missing_gpu_is_an_error_of_one_line(monkeypatch):
    monkeypatch.setattr(shared, "_made", {})
    monkeypatch.setattr(shared, "gpu_count", lambda: 1)
    with pytest.raises(DeviceError, match="2 GPUs are asked for, this machine has 1"):
        made()
    monkeypatch.setattr(shared, "_made", {4: None, 1: None})
    with pytest.raises(UsageError, match="this process uses 4 GPUs for an Mlp, not 2"):
        made()


def test_what_was_not_used_for_longest_is_freed_unless_a_graph_needs_it(machine, monkeypatch):
    monkeypatch.setattr(placement, "SCHEDULES", 4)
    it = made()
    machine.driver.answers["cuStreamIsCapturing"] = 0
    it.warm_up(1, 2, 3)
    machine.driver.answers["cuStreamIsCapturing"] = shared._ACTIVE
    it(x_of(1), stream=7)
    machine.driver.answers["cuStreamIsCapturing"] = 0
    live = len(FakeArena.live)
    for m in (2, *range(4, 20), 2):
        it(x_of(m), stream=7)
    kept = list(it._placement._ready)
    assert 1 in kept
    assert len(kept) == 5
    assert len(FakeArena.live) == live + 2
    names = [name for name, *_ in machine.log]
    assert "cuCtxSynchronize" in names  # nothing that is in flight is freed


@pytest.mark.usefixtures("machine")
def test_places_that_were_used_last_stay_ready(monkeypatch):
    monkeypatch.setattr(placement, "POINTERS", 3)
    it = made()
    for i in range(10):
        it(x_of(pointer=X + 4096 * 512 * i), stream=7)
    assert len(it._placement._ready[64].bound) == 3


def test_a_timeout_is_said_by_check_and_ends_the_object(machine):
    it = made()
    it(x_of(), stream=7)
    it.check()
    machine.gpus.error = 2
    with pytest.raises(PipelineTimeoutError, match="GPU 0 waited more than 2 s"):
        it.check()
    with pytest.raises(DeviceError, match=r"GPU 0 waited .* make a new Mlp"):
        it(x_of(), stream=7)
    it.close()


def test_a_closed_object_is_free_and_takes_no_calls(machine):
    with made() as it:
        it(x_of(), stream=7)
        assert FakeArena.live
    assert not FakeArena.live
    machine.log.clear()
    it.close()
    assert machine.log == []
    with pytest.raises(UsageError, match="this Mlp is closed"):
        it(x_of(), stream=7)


def test_the_callers_gpu_stays_current(machine):
    it = made()
    machine.driver.answers["cuCtxGetCurrent"] = 4711
    call(machine, it, x_of(), stream=7)
    assert machine.log[0] == ("cuCtxGetCurrent",)
    assert machine.log[-1] == ("cuCtxSetCurrent", 4711)


def test_threads_enqueue_one_call_after_the_other(machine):
    it = made()
    it.warm_up(64, 65)
    it(x_of(), stream=7)
    one = len(call(machine, it, x_of(), stream=7))
    machine.log.clear()

    def many(m: int) -> None:
        for _ in range(100):
            it(x_of(m, pointer=X * m), stream=7)

    threads = [threading.Thread(target=many, args=(m,)) for m in (64, 65)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = enqueued(machine.log)
    assert len(found) == 200 * one
    assert all(found[i : i + one] == found[:one] for i in range(0, len(found), one))


def test_torchs_stream_is_found(machine, monkeypatch):
    it = made()
    it(x_of(), stream=7)
    monkeypatch.setattr("ctatune.arguments.current_stream", lambda gpu: 70 + gpu)
    assert ("mlp early", 70) in call(machine, it, x_of())
    found = call(machine, it, [x_of(gpu=0), x_of(gpu=1)])
    assert ("mlp early", 70) in found
    assert ("mlp early", 71) in found
    assert arrays.LEGACY_STREAM == 0  # without torch


def test_import_is_free_of_cuda():
    code = "import sys, ctatune; assert not {m for m in sys.modules if m.startswith('cuda')}"
    subprocess.run([sys.executable, "-c", code], check=True)
