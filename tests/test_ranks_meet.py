"""Mlp.for_rank without GPUs: how ranks agree, fail together, and give memory back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlp_fakes import NO_DB, W_DOWN, W_UP, FakeArena, H, K, N, OnGpu, X, enqueued
from rank_fakes import all_raised, choice_of, seen_by, times

import ctatune
from ctatune import placement, ranks
from ctatune.errors import DeviceError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_ranks_meet_for_a_new_number_of_tokens_alone(pair):
    mlps = pair.made()
    pair.call(mlps)
    held, given = pair.meeting.held, FakeArena.given
    for _ in range(20):
        pair.call(mlps)
    assert (pair.meeting.held, FakeArena.given) == (held, given)
    pair.log.clear()
    pair.call(mlps, 65)
    assert pair.meeting.held > held
    assert not times(pair, "export")  # its flags are a piece of memory that is mapped
    assert max(times(pair, "zero")) < min(times(pair, "cuLaunchKernelEx"))


def test_the_choice_of_rank_0_is_that_of_all(pair):
    answer, other = choice_of("h"), choice_of("n")
    mlps = pair.each(lambda rank: pair.one(rank, choice=(answer, other)[rank]))
    plans = pair.each(lambda rank: mlps[rank].plan(64))
    assert plans[0] == plans[1]
    assert plans[0].config == answer.config
    copies = {entry[1:3] for entry in pair.log if entry[0] == "copy"}
    assert (W_DOWN.ctypes.data + 384 * 2, N) in copies  # W_down is divided along h
    alone = pair.each(lambda rank: pair.one(rank, choice=(None, other)[rank]))
    assert pair.each(lambda rank: alone[rank].plan(64))[1].config != other.config


DIFFERENT = {
    "max_m": ({"max_m": 599}, "the shape with the most tokens differs"),
    "weights": ({"weights": (W_UP, W_DOWN[:256].copy())}, "rank 1 has 600x128x768x256"),
    "no weights": ({"weights": (W_UP, W_UP)}, "w_up must be h x k and w_down n x h"),
    "far": ({"weights": (OnGpu((H, K), X, 0), W_DOWN)}, "on the host or GPU 1: GPU 0"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_in_one_rank_is_an_error_of_all(pair, name):
    rest, message = DIFFERENT[name]

    def make(rank: int) -> Any:
        mine = dict(rest) if rank == 1 else {}
        return pair.one(rank, *mine.pop("weights", ()), **mine)

    all_raised(pair.each(make), UsageError, message)
    assert not times(pair, "copy")


def test_ranks_of_different_kernels_or_worlds_refuse_each_other(pair, monkeypatch):
    def another(rank: int) -> Any:
        return ctatune.Mlp.for_rank(
            rank, 2 + rank, W_UP, W_DOWN, exchange=pair.meeting.of(rank), db=NO_DB
        )

    errors = pair.each(another)
    all_raised(errors[:1], UsageError, "ranks do not make the same calls")
    all_raised(errors[1:], UsageError, "exchange must return what each of 3 ranks gave")
    same = pair.each(lambda rank: pair.one(0, exchange=pair.meeting.of(rank)))
    all_raised(same, UsageError, "exchange must return")
    hashes = iter(["old", "new"])
    monkeypatch.setattr(ranks, "kernel_hash", lambda: next(hashes))
    all_raised(pair.made(), UsageError, "on 2 ranks)")
    with pytest.raises(UsageError, match="got rank 2 of 2"):
        pair.one(2, exchange=pair.meeting.of(0))


def test_another_number_of_tokens_is_an_error_of_both(pair):
    mlps = pair.made()

    def call(rank: int) -> Any:
        m = 64 + rank
        return mlps[rank](OnGpu((m, K), X, rank), stream=7)

    all_raised(pair.each(call), UsageError, "a plan for 65 tokens")
    pair.call(mlps)  # they met, and may go on
    assert len(enqueued(pair.log)) == 4


def test_two_objects_do_not_meet(pair):
    mlps, others = pair.made(), pair.made()
    crossed = pair.each(lambda rank: (mlps, others)[rank][rank].warm_up(64))
    all_raised(crossed, UsageError, "ranks do not make the same calls")


def test_one_rank_that_closes_alone_is_an_error_of_the_others_and_both_can_leave(pair):
    mlps = pair.made()

    def end(rank: int) -> Any:
        return mlps[0].warm_up(64) if rank == 0 else mlps[1].close()

    with pytest.warns(UserWarning, match="memory that ranks share is not freed"):
        early, late = pair.each(end)
    assert late is None
    all_raised([early], UsageError, "rank 1 at closing")
    pair.each(lambda rank: mlps[0].close() if rank == 0 else None)  # meets nobody
    assert len(times(pair, "unmap")) == 2 * 3  # flags, Y1, Y2


def test_a_choice_that_is_none_is_an_error_of_all(pair):
    errors = pair.each(lambda rank: pair.one(rank, choice="best" if rank == 0 else None))
    all_raised(errors[1:], DeviceError, "rank 0: ")
    assert isinstance(errors[0], TypeError)


@pytest.mark.parametrize("answer", [None, [b"1", b"2"], [b"{}"], [b"x", b"y"], 3])
def test_an_exchange_that_gives_something_else(pair, answer):
    with pytest.raises(UsageError, match="exchange must return what each of 2 ranks gave"):
        pair.one(0, exchange=lambda _: answer)


def test_gpus_must_be_different_and_reach_each_other(pair, monkeypatch):
    pair.gpus[1].devices[0].uuid = "GPU-0"
    all_raised(pair.made(), DeviceError, "ranks 0 and 1 use the same GPU (GPU-0)")
    pair.gpus[1].devices[0].uuid = "GPU-1"
    monkeypatch.setattr(pair.gpus[1], "support", lambda *_: None)
    all_raised(pair.made(), DeviceError, "what rank 1 writes to rank ")
    bad = ranks.driver.CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
    ranks.driver.answers["open"] = bad  # pyright: ignore[reportAttributeAccessIssue]
    all_raised(pair.made(), DeviceError, "ranks need GPUs with peer access in one machine")
    assert FakeArena.live == set()


def test_nothing_is_freed_before_everyone_has_left(pair):
    mlps = pair.made()
    pair.call(mlps)
    pair.log.clear()
    pair.each(lambda rank: mlps[rank].close())
    assert max(times(pair, "cuCtxSynchronize")) < min(times(pair, "unmap"))
    assert max(times(pair, "unmap")) < min(times(pair, "free"))
    assert len(times(pair, "unmap")) == 2 * 3  # flags, Y1, Y2
    assert FakeArena.live == set()
    held = pair.meeting.held
    pair.each(lambda rank: mlps[rank].close())
    assert pair.meeting.held == held


def test_schedules_go_when_all_ranks_are_idle_and_flags_are_taken_again(pair, monkeypatch):
    monkeypatch.setattr(placement, "SCHEDULES", 4)
    mlps = pair.made()
    pair.each(lambda rank: mlps[rank].warm_up(1, 2, 3, 4))
    blocks = [entry[3] for entry in pair.log if entry[0] == "cuLaunchKernelEx"]
    pair.log.clear()
    pair.each(lambda rank: mlps[rank].warm_up(5))
    assert not times(pair, "export")
    zeroed = [entry[2] for entry in pair.log if entry[0] == "zero"]
    assert set(zeroed) <= {int(block["panels"]) for block in blocks}
    assert max(times(pair, "cuCtxSynchronize")) < min(times(pair, "zero"))
    assert list(mlps[0]._placement._ready) == list(mlps[1]._placement._ready) == [2, 3, 4, 5]


def test_a_rank_that_is_left_alone_frees_nothing_that_others_may_use(pair):
    mlps = pair.made()
    pair.call(mlps)

    def gone(_: bytes) -> Any:
        raise ConnectionError("rank 1 is gone")

    def leave(rank: int) -> None:
        mlps[rank]._placement._ranks._exchange = gone
        try:
            mlps[rank](OnGpu((65, K), X, rank), stream=7)
        except ConnectionError:
            mlps[rank].close()

    assert pair.each(leave) == [None, None]
    assert not times(pair, "free")
    assert len(FakeArena.live) == 2
    assert len(times(pair, "unmap")) == 2 * 3


def test_big_flags_have_a_block_of_their_own(pair):
    mlps = pair.made()

    def take(rank: int) -> Any:
        own = mlps[rank]._placement._ranks
        arena = FakeArena(None)
        sizes = (1, 4096, 4097, ranks.BLOCK_BYTES + 1)
        found = [own.zeros(arena, size) for size in sizes]
        arena.close()
        again = [own.zeros(FakeArena(None), size) for size in sizes]
        return found, again

    (mine, again), (theirs, _) = pair.each(take)
    assert sorted(mine) == sorted(again)
    assert len({p[0] for p in mine}) == 4
    for (own, mapped), (back, other) in zip(mine, theirs, strict=True):
        assert (mapped, back) == (seen_by(0, other), seen_by(1, own))
    assert np.diff(sorted(p[0] for p in mine[:3])).min() >= 4096
