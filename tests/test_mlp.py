"""ctatune.Mlp without GPUs: what it enqueues and in which order, and what it keeps."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlp_fakes import (
    ACTIVE,
    NO_DB,
    OUT,
    W_DOWN,
    W_UP,
    FakeArena,
    H,
    K,
    N,
    OnGpu,
    X,
    as_map,
    blocks,
    call,
    enqueued,
    events,
    made,
    x_of,
)

import ctatune
from ctatune import placement, shared
from ctatune.config import Config, Tile
from ctatune.errors import DeviceError, PipelineTimeoutError, UsageError

SQUARE = Tile(m=128, n=128)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_each_gpu_gets_its_rows_of_the_weights(machine):
    made()
    copies = [entry[1:] for entry in machine.log if entry[0] == "copy"]
    up, down = W_UP.ctypes.data, W_DOWN.ctypes.data
    assert copies == [
        (up, 512, K * 2, K * 2, K * 2, 0, True),
        (up + 512 * K * 2, 256, K * 2, K * 2, K * 2, 1, True),
        (down, 256, H * 2, H * 2, H * 2, 0, True),
        (down + 256 * H * 2, 256, H * 2, H * 2, H * 2, 1, True),
    ]


def test_each_gpu_gets_its_columns_of_w_down_where_y2_is_summed_over_gpus(machine):
    answer = ctatune.best(f"64x{K}x{H}x{N}", gpus=2, db=NO_DB)
    config = Config(up=SQUARE, down=SQUARE, stages=4, d_slabs=2, mix=1.0, down_axis="h")
    made(choice=replace(answer, config=config))
    down = W_DOWN.ctypes.data
    copies = [entry[1:] for entry in machine.log if entry[0] == "copy"]
    assert copies[2:] == [
        (down, N, 384 * 2, H * 2, 384 * 2, 0, True),
        (down + 384 * 2, N, 384 * 2, H * 2, 384 * 2, 1, True),
    ]


def test_rows_of_weights_begin_with_cache_lines(machine):
    w_up, w_down = np.zeros((776, 136), np.uint16), np.zeros((512, 776), np.uint16)
    mlp = ctatune.Mlp(w_up, w_down, gpus=2, max_m=64, db=NO_DB)
    copies = [entry[1:] for entry in machine.log if entry[0] == "copy"]
    assert [copy[1:5] for copy in copies] == [
        (512, 136 * 2, 136 * 2, 192 * 2),
        (264, 136 * 2, 136 * 2, 192 * 2),
        (256, 776 * 2, 776 * 2, 832 * 2),
        (256, 776 * 2, 776 * 2, 832 * 2),
    ]
    maps = mlp._placement._ready_for(64, captured=False).placed._arguments[0][0].block
    assert bytes(maps["w_up"]).strip().endswith(b", 192)")
    assert b"(2, 64, 832)" in bytes(maps["y1"])


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


def test_a_peer_has_one_graph_that_gets_the_places_of_each_call(machine):
    it = made()
    for _ in range(2):
        for pointer in (X, 3 * X):
            call(machine, it, x_of(pointer=pointer), OnGpu((64, N), OUT), stream=7)
            assert blocks(machine)[0]["x"][0] == as_map(pointer, (64, K), 64, 64, None)
            assert blocks(machine)[1]["y2_to"][:2].tolist() == [it._placement._own.y2[1], OUT]
            (pull,) = [entry for entry in machine.log if entry[2:3] == ("pull",)]
            words = [c.listed.bound.pulls[1] for c in it._placement._calls.values()]
            assert [w.block[1] for w in words if w.address == pull[3]] == [pointer]
    assert len(machine.driver.graphs) == 1


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
    found = call(machine, first, x_of(), stream=9)
    assert found[:2] == [(f"wait {ended1}", 101), (f"record {events(machine)[0]}", 9)]


def test_a_captured_call_takes_streams_and_events_of_its_own(machine):
    it = made()
    it.warm_up(64)
    machine.driver.answers["cuStreamIsCapturing"] = ACTIVE
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


@pytest.mark.parametrize("status", ["ACTIVE", "INVALIDATED"])
def test_a_capture_of_a_call_on_several_streams_is_refused(machine, status):
    it = made()
    found = f"CU_STREAM_CAPTURE_STATUS_{status}"
    machine.driver.answers["cuStreamIsCapturing"] = getattr(type(ACTIVE), found)
    with pytest.raises(UsageError, match="a call with X on each GPU of a process cannot be capt"):
        it([x_of(gpu=0), x_of(gpu=1)], stream=[7, 8])


def test_the_default_stream_is_that_of_gpu_0(machine):
    it = made()
    it([x_of(gpu=0), x_of(gpu=1)], stream=[7, 8])  # the last one that used a GPU used GPU 1
    machine.log.clear()
    it(x_of(), stream=0)
    names = [name for name, *_ in machine.log]
    first = names.index("cuEventRecord")
    assert machine.log[first - 1] == ("cuCtxSetCurrent", machine.shared._contexts[0])


@pytest.mark.usefixtures("machine")
def test_a_build_that_fails_leaves_nothing_behind(monkeypatch):
    it = made()
    it(x_of(), stream=7)
    live = len(FakeArena.live)

    def broken(*_: Any) -> Any:
        raise DeviceError("no memory left")

    monkeypatch.setattr(FakeArena, "upload", broken)
    for _ in range(3):
        with pytest.raises(DeviceError, match="no memory left"):
            it(x_of(65), stream=7)
    assert len(FakeArena.live) == live
    assert it(x_of(), stream=7).shape == (64, N)


@pytest.mark.usefixtures("machine")
def test_streams_of_torch_are_taken():
    it = made()
    stream = SimpleNamespace(cuda_stream=7)
    y = it(x_of(), stream=stream)
    assert it(x_of(), stream=7) is y


def test_blocks_lead_to_the_callers_x_and_y2_and_to_our_own_elsewhere(machine):
    it = made()
    call(machine, it, x_of(), OnGpu((64, N), OUT), stream=7)
    found, own = blocks(machine), it._placement._own
    rows = 64
    assert found[0]["x"][0] == as_map(X, (64, K), rows, 64, None)
    assert found[1]["x"][0] == as_map(own.x[1], (64, K), rows, 64, None)
    assert found[0]["y2_to"][:2].tolist() == [OUT, own.y2[1]]  # the nearest first
    assert found[1]["y2_to"][:2].tolist() == [own.y2[1], OUT]
    (pull,) = [entry for entry in machine.log if entry[2:3] == ("pull",)]
    (listed, *_) = next(iter(it._placement._calls.values()))
    words = listed.bound.pulls[1]
    assert pull[3] == words.address
    assert words.block.tolist() == [own.x[1], X, 64 * K * 2 // 16]


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


@pytest.mark.usefixtures("machine")
def test_a_call_allocates_nothing_after_the_first():
    it = made()
    it.warm_up(*range(1, 20))
    given = FakeArena.given
    for i in range(200):
        it(x_of(1 + i % 19, pointer=X + 4096 * (i % 7)), stream=7)
    assert FakeArena.given == given


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


def test_what_was_not_used_for_longest_is_freed_unless_a_graph_needs_it(machine, monkeypatch):
    monkeypatch.setattr(placement, "SCHEDULES", 4)
    it = made()
    machine.driver.answers["cuStreamIsCapturing"] = shared._NOT_CAPTURED
    it.warm_up(1, 2, 3)
    machine.driver.answers["cuStreamIsCapturing"] = ACTIVE
    it(x_of(1), stream=7)
    machine.driver.answers["cuStreamIsCapturing"] = shared._NOT_CAPTURED
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
def test_calls_that_were_made_last_stay_ready(monkeypatch):
    monkeypatch.setattr(placement, "CALLS", 3)
    it = made()
    for i in range(10):
        it(x_of(pointer=X + 4096 * 512 * (i if i % 2 else 0)), stream=7)
    places = [x for _, _, x, _ in it._placement._calls]
    assert [pointer - X for ((pointer, *_),) in places] == [4096 * 512 * i for i in (7, 0, 9)]


def test_a_timeout_is_said_by_check_and_ends_the_object(machine):
    it = made()
    it(x_of(), stream=7)
    it.check()
    machine.gpus.error = 2
    with pytest.raises(PipelineTimeoutError, match="GPU 0 waited more than 2 s"):
        it.check()
    for again in (lambda: it(x_of(), stream=7), lambda: it.warm_up(64)):
        with pytest.raises(DeviceError, match=r"GPU 0 waited .* make a new Mlp"):
            again()
    it.close()


def test_a_closed_object_is_free_and_takes_no_calls(machine):
    with made() as it:
        it(x_of(), stream=7)
        assert FakeArena.live
    assert not FakeArena.live
    machine.log.clear()
    it.close()
    assert machine.log == []
    for use in (lambda: it(x_of(), stream=7), lambda: it.plan(64)):
        with pytest.raises(UsageError, match="this Mlp is closed"):
            use()


def test_the_callers_gpu_stays_current(machine):
    it = made()
    machine.driver.answers["cuCtxGetCurrent"] = 4711

    def contexts(stream: int) -> list[tuple[Any, ...]]:
        call(machine, it, x_of(), stream=stream)
        return [entry for entry in machine.log if entry[0].startswith("cuCtx")]

    back = ("cuCtxSetCurrent", 4711)
    assert contexts(7)[-1] == back
    assert contexts(7) == []  # a call that is ready, on a stream that is known by itself
    assert contexts(0)[-1] == back
    found = contexts(0)  # the default stream is that of the current context
    assert found == [("cuCtxGetCurrent",), ("cuCtxSetCurrent", machine.shared._contexts[0]), back]


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
