"""What only real GPUs can show: races between calls, bounded polls, the whole protocol."""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ctatune import abi, space
from ctatune.abi import Flags
from ctatune.config import Baseline, Config, Tile
from ctatune.errors import PipelineTimeoutError
from ctatune.gemm import Gemm
from ctatune.gpus import LINE_BYTES, Gpus, check
from ctatune.launch import PlacedSchedule
from ctatune.layout import Sizes, pitch
from ctatune.operands import Inputs, place
from ctatune.problem import BF16_BYTES, Problem
from ctatune.records import RELATIVE_LIMIT, WORST_LIMIT
from ctatune.schedule import Columns, build
from ctatune.space import default_config
from ctatune.worker import Worker

CALLS = 200
ONE_OR_TWO = [1, pytest.param(2, marks=pytest.mark.gpus(2))]


def count_from(gpus: Gpus, placed: PlacedSchedule, calls: int) -> None:
    """Makes all flags what they are after so many calls."""
    from cuda.bindings import driver

    schedule = placed.schedule
    counters, everyone = schedule.panels * len(schedule.arrivals(0)), range(schedule.problem.gpus)
    for gpu in everyone:
        flags = placed._flags[gpu]
        words = np.zeros((Flags.nbytes(counters) // LINE_BYTES, LINE_BYTES // 4), np.uint64)
        of_a_panel = np.tile(schedule.arrivals(gpu), schedule.panels).astype(np.uint64)
        for parity, done in enumerate((calls - calls // 2, calls // 2)):
            words[parity * counters : (parity + 1) * counters, 0] = of_a_panel * np.uint64(done)
        line = 2 * counters
        words[line : line + len(everyone), 0] = calls
        arrivals = placed.ctas * len(schedule.senders(gpu))
        words[(flags.arrived - flags.panels) // LINE_BYTES, 0] = calls * arrivals
        words[(flags.calls - flags.panels) // LINE_BYTES, :2] = calls, calls >> 32
        low = (words & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        gpus.use(gpu)
        stream = gpus.streams[gpu].handle
        check(driver.cuMemcpyHtoDAsync(flags.panels, low.ctypes.data, low.nbytes, stream))
        gpus.wait(gpu)


def outputs_of_calls(
    bench, problem: Problem, config: Config, *, late: bool, before: int = 0
) -> list[bytes]:
    """Y2 of every GPU after each of CALLS calls back to back, copied on the GPUs' own streams.

    Operand sets alternate, so each call has other inputs than the one before. `late` delays a
    random GPU before each call; `before` calls were counted already.
    """
    from cuda.bindings import driver

    gpus, rng = bench.gpus, np.random.default_rng(7)
    nbytes = problem.m * problem.n * BF16_BYTES
    with gpus.arena() as arena:
        schedule = build(problem, config)
        sets = place(Inputs(gpus, arena, problem, 3), schedule, 3)
        placed = PlacedSchedule(gpus, arena, schedule, sets)
        count_from(gpus, placed, before)
        kept = [[arena.alloc(g, nbytes) for _ in range(CALLS)] for g in range(problem.gpus)]
        for i in range(CALLS):
            if late:
                delay_ns = np.int64(rng.integers(0, 300_000))
                gpus.support("delay", int(rng.integers(problem.gpus)), 1, 1, delay_ns)
            placed.call(i)
            for gpu, copies in enumerate(kept):
                gpus.use(gpu)
                stream = gpus.streams[gpu].handle
                check(driver.cuMemcpyDtoDAsync(copies[i], sets[0].y2[gpu], nbytes, stream))
        gpus.sync()
        placed.check()
        return [
            gpus.download(g, copies[i], (nbytes,), np.uint8).tobytes()
            for i in range(CALLS)
            for g, copies in enumerate(kept)
        ]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("m", [64, 384, 512])  # direct, slabs with split-K, multicast
@pytest.mark.parametrize(("mix", "axis"), [(1.0, "n"), (0.5, "n"), (0.0, "n"), (1.0, "h")])
def test_calls_back_to_back_with_a_late_gpu(bench, mix, axis, m):
    """A slow peer must never read or miss what belongs to another call."""
    problem = Problem(m=m, k=512, h=1024, n=512, gpus=2)
    config = replace(default_config(problem), mix=mix, down_axis=axis)
    late = outputs_of_calls(bench, problem, config, late=True)
    prompt = outputs_of_calls(bench, problem, config, late=False)
    assert late == prompt
    assert len(set(late)) == 3  # one output an operand set, the same on both GPUs


@pytest.mark.gpus(2)
@pytest.mark.parametrize("axis", ["n", "h"])
@pytest.mark.parametrize("before", [(1 << 32) - CALLS // 2, (1 << 33) - CALLS // 2])
def test_counts_may_wrap(bench, before, axis):
    """An odd number of tiles in a panel: its counter wraps elsewhere than the number of calls."""
    problem = Problem(m=512, k=512, h=3 * 256, n=512, gpus=2)
    config = replace(default_config(problem), down_axis=axis)
    assert build(problem, config).segment_arrivals == (3, 3)
    wrapped = outputs_of_calls(bench, problem, config, late=True, before=before)
    assert wrapped == outputs_of_calls(bench, problem, config, late=False)


@pytest.mark.gpus(2)
def test_a_peer_that_never_starts_ends_in_an_error(bench, monkeypatch):
    """One GPU is not launched: the other one's polls run out and say what they waited for."""
    monkeypatch.setattr(abi, "POLL_TIMEOUT_NS", 20_000_000)
    problem = Problem(m=256, k=256, h=512, n=256, gpus=2)
    gpus = bench.gpus
    with gpus.arena() as arena:
        schedule = build(problem, default_config(problem))
        sets = place(Inputs(gpus, arena, problem, 3), schedule, 1)
        placed = PlacedSchedule(gpus, arena, schedule, sets)
        placed.call_on(0)
        gpus.sync()
        awaited = r"(panel \d of Y1|the start of GPU 1|Y2 of its peers): target \d+, value \d+"
        with pytest.raises(PipelineTimeoutError, match=r"GPU 0 waited .* for " + awaited):
            placed.check()


def prove_gemm(bench, gpu: int, config: Config, sizes: tuple[int, int, int]) -> None:
    """Three calls in flight over two sets, outputs poisoned, against the reference."""
    (m, n, k), gpus = sizes, bench.gpus
    with gpus.arena() as arena:
        inputs = Inputs(gpus, arena, Problem(m=m, k=k, h=n, n=8), 3)
        sets = [
            (inputs.x(gpu, i), inputs.w_up(gpu, Columns(0, n), i), arena.alloc(gpu, m * n * 2))
            for i in range(2)
        ]
        gemm = Gemm(gpus, arena, gpu, config, Sizes(m, n, k, k, pitch(k), n), sets)
        for _, _, y in sets:
            gpus.fill(gpu, y, 0xFF, m * n * BF16_BYTES)
        for which in (0, 1, 2):
            gemm.call(which)
        gpus.sync()
        gemm.check()
        wanted = arena.alloc(gpu, m * n * 4)
        grid, edges = (-(-n // 64), -(-m // 64)), [np.int32(v) for v in (*sizes, k, pitch(k))]
        for x, w, y in sets:
            gpus.support("reference_gemm", gpu, grid, 256, x, w, 0, wanted, *edges)
            want = gpus.download(gpu, wanted, (m, n), np.float32)
            bits = gpus.download(gpu, y, (m, n), np.uint16).astype(np.uint32)
            difference = (bits << np.uint32(16)).view(np.float32) - want
            assert np.linalg.norm(difference) <= RELATIVE_LIMIT * np.linalg.norm(want)
            assert np.abs(difference).max() <= WORST_LIMIT * want.std()


WIDE, SMALL = Tile(m=128, n=256, group_m=4), Tile(m=64, n=64, split_k=2)
GEMMS = {
    "128x256": Config(up=WIDE, down=WIDE, stages=3, d_slabs=4),
    "64x64/k2": Config(up=SMALL, down=SMALL, stages=13, d_slabs=2, direct=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("config", GEMMS.values(), ids=list(GEMMS))
@pytest.mark.parametrize(
    "sizes", [(200, 712, 328), (1, 8, 8), (2048, 8192, 4096)], ids=lambda s: "x".join(map(str, s))
)
def test_a_gemm_is_right(bench, config, sizes):
    for gpu in range(len(bench.gpus)):
        prove_gemm(bench, gpu, config, sizes)


@pytest.mark.gpu
def test_memory_is_filled_before_what_follows_on_the_stream(bench):
    """The poison of a large Y1 was once still being written when the kernel ran."""
    gpus, nbytes = bench.gpus, 1 << 30
    with gpus.arena() as arena:
        large, kept = arena.alloc(0, nbytes), arena.alloc(0, nbytes)
        gpus.fill(0, large, 0xFF, nbytes)
        gpus.copy(kept, large, nbytes, gpus.streams[0])
        gpus.fill(0, large, 0, nbytes)
        gpus.copy(kept, large, nbytes // 2, gpus.streams[0])
        seen = gpus.download(0, kept, (nbytes,), np.uint8)
        assert not seen[: nbytes // 2].any()
        assert (seen[nbytes // 2 :] == 0xFF).all()


@pytest.mark.gpu
@pytest.mark.real
def test_a_trial_on_one_gpu(bench):
    problem = Problem(m=512, k=1024, h=1024, n=1024)
    measured = bench.trial(problem, default_config(problem), 5)
    assert measured.outcome == "ok", measured.detail
    assert measured.verification is not None
    assert measured.verification.bitwise_equal
    assert len(measured.samples_us) == 5
    assert measured.kernel is not None
    assert measured.kernel.local_bytes <= 16  # accumulators do not spill


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", ONE_OR_TWO)
@pytest.mark.real
def test_finals_race_the_baseline_too(bench, gpus):
    pytest.importorskip("nvmath")
    problem = Problem(m=512, k=2048, h=2048, n=2048, gpus=gpus)
    configs = [default_config(problem), Baseline(), default_config(problem)]  # one twice
    rows = bench.finals(problem, configs, 5)
    assert [row.outcome for row in rows] == ["ok"] * 3, [row.detail for row in rows]
    assert len({len(row.samples_us) for row in rows}) == 1
    assert all(0 < row.gpu_state["joules"] < 10 for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", ONE_OR_TWO)
@pytest.mark.parametrize("m", [1, 100, 384])
@pytest.mark.real
def test_every_baseline_is_right(bench, m, gpus):
    pytest.importorskip("nvmath")
    pytest.importorskip("nccl")
    problem = Problem(m=m, k=1024, h=2048, n=1024, gpus=gpus)
    for baseline in space.baselines(problem):
        measured = bench.trial(problem, baseline, 5)
        assert measured.outcome == "ok", (str(baseline), measured.detail)


@pytest.mark.gpus(2)
@pytest.mark.real
def test_a_config_that_does_not_fit_is_a_row(bench):
    problem = Problem(m=512, k=1024, h=1024, n=1024, gpus=2)
    measured = bench.trial(problem, replace(default_config(problem), stages=9), 5)
    assert measured.outcome == "invalid"
    assert "shared memory must be at most" in measured.detail


@pytest.mark.gpu
@pytest.mark.real
def test_two_tuners_on_one_gpu_are_refused(bench):
    from ctatune.errors import DeviceError

    assert bench.platform().sm_count > 0
    with pytest.raises(DeviceError, match="another ctatune measures"):
        Worker(1)
