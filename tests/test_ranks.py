"""Mlp.for_rank without GPUs: what the call of a rank enqueues, and where its kernel stores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlp_fakes import (
    ACTIVE,
    OUT,
    W_DOWN,
    W_UP,
    H,
    K,
    N,
    OnGpu,
    X,
    as_map,
    enqueued,
    fake_machine,
    made,
    x_of,
)
from rank_fakes import all_raised, choice_of, seen_by, times

from ctatune.abi import PARAMS
from ctatune.errors import PipelineTimeoutError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def launched(pair: Any) -> list[Any]:
    """The parameter blocks of the last call, by rank."""
    calls = [entry for entry in pair.log if entry[0] == "cuLaunchKernelEx"]
    return [
        next(block for _, config, _, block, _ in reversed(calls) if int(config.hStream) == 7 + rank)
        for rank in range(2)
    ]


def stream_of(entry: tuple[Any, ...]) -> int:
    return int(entry[1].hStream if entry[0] == "cuLaunchKernelEx" else entry[-1])


def test_each_rank_copies_its_part_of_the_weights(pair):
    pair.made()
    up, down = W_UP.ctypes.data, W_DOWN.ctypes.data
    copies = {entry[1:] for entry in pair.log if entry[0] == "copy"}
    assert copies == {
        (up, 512, K * 2, K * 2, K * 2, 0, True),
        (up + 512 * K * 2, 256, K * 2, K * 2, K * 2, 0, True),
        (down, 256, H * 2, H * 2, H * 2, 0, True),
        (down + 256 * H * 2, 256, H * 2, H * 2, H * 2, 0, True),
    }


@pytest.mark.parametrize("axis", ["n", "h"])
def test_blocks_lead_to_own_memory_and_to_that_of_peers_as_it_is_mapped_here(pair, axis):
    mlps = pair.made(choice=choice_of(axis))
    pair.call(mlps)
    found = launched(pair)
    for rank, other in ((0, 1), (1, 0)):
        mine, theirs = found[rank], found[other]
        assert mine["x"][0] == as_map(X + (rank << 30), (64, K), 64, 64, None)
        for name in ("y1_to", "y2_to"):
            assert mine[name][1] == seen_by(rank, int(theirs[name][0]))  # the nearest first
        panels = [int(mine["panels"]), seen_by(rank, int(theirs["panels"]))]
        assert mine["panels_out"][:2].tolist() == panels
        assert mine["arrived_out"][0] == seen_by(rank, int(theirs["arrived"]))
        started = [int(mine["started"]), seen_by(rank, int(theirs["started"]))]
        by_number = started if rank == 0 else started[::-1]
        assert mine["started_out"][:2].tolist() == [flag + rank * 128 for flag in by_number]
        assert (mine["arrivals"], mine["peers"]) == (132, 2)
    assert found[0]["error"] != found[1]["error"]
    assert found[0]["tiles"] != found[1]["tiles"]


@pytest.mark.parametrize("axis", ["n", "h"])
def test_blocks_are_those_of_one_process_but_for_pointers(pair, monkeypatch, axis):
    pair.call(pair.made(choice=choice_of(axis)), 300)
    ranked = launched(pair)
    machine = fake_machine(monkeypatch)
    it = made(choice=choice_of(axis))
    it([x_of(300, 0), x_of(300, 1)], stream=[7, 8])
    numbers = [name for name in PARAMS.names or () if PARAMS[name].base.kind == "i"]
    assert len(numbers) > 20
    for mine, one in zip(ranked, launched(machine), strict=True):
        assert all(np.array_equal(mine[name], one[name]) for name in numbers)


def test_a_call_is_one_kernel_on_the_stream_of_the_rank(pair):
    mlps = pair.made()
    pair.call(mlps)
    pair.log.clear()
    ys = pair.call(mlps)
    own = pair.shared[1]._eager.ended[0]
    assert [e for e in enqueued(pair.log) if e[1] == 8] == [
        ("mlp early", 8),
        (f"record {own}", 8),
    ]
    assert [y.__dlpack_device__() for y in ys] == [(2, 0), (2, 1)]
    assert [y.view.pointer for y in ys] == [mlps[r]._placement._own.y2[r] for r in range(2)]
    assert [y.shape for y in ys] == [(64, N)] * 2


def test_y2_is_copied_out_after_the_kernel_and_before_the_next_call(pair):
    mlps = pair.made()
    pair.call(mlps)
    pair.log.clear()
    pair.call(mlps, out=True)
    steps = ("cuLaunchKernelEx", "cuMemcpyDtoDAsync", "cuEventRecord")
    names = [entry[0] for entry in pair.log if entry[0] in steps]
    assert sorted(names) == sorted(steps * 2)
    copies = [entry[1:] for entry in pair.log if entry[0] == "cuMemcpyDtoDAsync"]
    for rank, (to, source, nbytes, stream) in enumerate(sorted(copies)):
        y2 = mlps[rank]._placement._own.y2[rank]
        assert (to, source, nbytes) == (OUT + (rank << 30), y2, 64 * N * 2)
        assert int(stream) == 7 + rank
        assert launched(pair)[rank]["y2_to"][0] == y2
        mine = [e[0] for e in pair.log if e[0] in steps and stream_of(e) == 7 + rank]
        assert mine == list(steps)


def test_a_captured_call_is_a_kernel_and_a_copy(pair):
    mlps = pair.made()
    pair.each(lambda rank: mlps[rank].warm_up(64))
    pair.driver.answers["cuStreamIsCapturing"] = ACTIVE
    pair.log.clear()
    held = pair.meeting.held
    pair.call(mlps, out=True)
    assert sorted(enqueued(pair.log)) == [("mlp", 7), ("mlp", 8)]
    assert len(times(pair, "cuMemcpyDtoDAsync")) == 2
    for error in pair.call(mlps, 65):
        assert isinstance(error, UsageError)
        assert "call warm_up(65) before a capture" in str(error)
    assert pair.meeting.held == held


def test_a_timeout_names_the_rank(pair):
    mlps = pair.made()
    pair.call(mlps)
    pair.gpus[1].error = 2
    first, second = pair.each(lambda rank: mlps[rank].check())
    assert first is None
    assert isinstance(second, PipelineTimeoutError)
    assert "GPU 1 waited more than 2 s for the start of GPU 0" in str(second)


def test_x_must_lie_on_the_gpu_of_the_rank_and_out_not_on_y(pair):
    mlps = pair.made()
    x = OnGpu((64, K), X, 0)
    wrong = pair.each(lambda rank: mlps[rank](x, stream=7) if rank else None)
    assert "x must lie on GPU 1, it lies on GPU 0" in str(wrong[1])
    ys = pair.call(mlps)
    own = pair.each(lambda rank: mlps[rank](OnGpu((64, K), X, rank), ys[rank], stream=7))
    all_raised(own, UsageError, "x and out must not overlap")


def test_a_rank_may_have_any_gpu_of_its_process(pair):
    swapped = pair.each(lambda rank: pair.one(rank, gpu=1 - rank))
    ys = pair.each(lambda rank: swapped[rank](OnGpu((1, K), X, 1 - rank), stream=7 + rank))
    assert [y.view.gpu for y in ys] == [1, 0]
