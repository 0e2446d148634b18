"""What only real GPUs can show: races between calls, bounded polls, the whole protocol."""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ctatune import launch, space
from ctatune.config import Baseline, Config
from ctatune.errors import PipelineTimeoutError
from ctatune.launch import BF16_BYTES, Mlp
from ctatune.operands import Inputs, place
from ctatune.problem import Problem
from ctatune.schedule import build
from ctatune.space import default_config
from ctatune.worker import Worker

CALLS = 40


def outputs_of_calls(bench, problem: Problem, config: Config, *, late: bool) -> list[bytes]:
    """Y2 of every GPU after each of CALLS calls back to back, copied on the GPUs' own streams.

    Operand sets alternate, so each call has other inputs than the one before. `late` delays a
    random GPU before each call.
    """
    from cuda.bindings import driver

    gpus, rng = bench.gpus, np.random.default_rng(7)
    nbytes = problem.m * problem.n * BF16_BYTES
    with gpus.arena() as arena:
        schedule = build(problem, config)
        sets = place(Inputs(gpus, arena, problem, 3), schedule, 3)
        mlp = Mlp(gpus, arena, schedule, sets)
        kept = [[arena.alloc(g, nbytes) for _ in range(CALLS)] for g in range(problem.gpus)]
        for i in range(CALLS):
            if late:
                delay_ns = np.int64(rng.integers(0, 300_000))
                gpus.support("delay", int(rng.integers(problem.gpus)), 1, 1, delay_ns)
            mlp.call(i)
            for gpu, copies in enumerate(kept):
                gpus.use(gpu)
                stream = gpus.streams[gpu].handle
                launch.check(driver.cuMemcpyDtoDAsync(copies[i], sets[0].y2[gpu], nbytes, stream))
        gpus.sync()
        mlp.check()
        return [
            gpus.download(g, copies[i], (nbytes,), np.uint8).tobytes()
            for i in range(CALLS)
            for g, copies in enumerate(kept)
        ]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("mix", [1.0, 0.5, 0.0])
def test_calls_back_to_back_with_a_late_gpu(bench, mix):
    """A slow peer must never read or miss what belongs to another call."""
    problem = Problem(m=384, k=512, h=1024, n=512, gpus=2)
    config = replace(default_config(problem), mix=mix)
    late = outputs_of_calls(bench, problem, config, late=True)
    prompt = outputs_of_calls(bench, problem, config, late=False)
    assert late == prompt
    assert len(set(late)) == 3  # one output an operand set, the same on both GPUs


@pytest.mark.gpus(2)
def test_a_peer_that_never_starts_ends_in_an_error(bench, monkeypatch):
    """One GPU is not launched: the other one's polls run out and say what they waited for."""
    monkeypatch.setattr(launch, "POLL_TIMEOUT_NS", 20_000_000)
    problem = Problem(m=256, k=256, h=512, n=256, gpus=2)
    gpus = bench.gpus
    with gpus.arena() as arena:
        schedule = build(problem, default_config(problem))
        sets = place(Inputs(gpus, arena, problem, 3), schedule, 1)
        mlp = Mlp(gpus, arena, schedule, sets)
        mlp.call_on(0)
        gpus.sync()
        awaited = r"(panel \d of Y1|the start of GPU 1|Y2 of its peers): target \d+, value \d+"
        with pytest.raises(PipelineTimeoutError, match=r"GPU 0 waited .* for " + awaited):
            mlp.check()


@pytest.mark.gpu
def test_a_trial_on_one_gpu(bench):
    problem = Problem(m=512, k=1024, h=1024, n=1024)
    measured = bench.trial(problem, default_config(problem), 5)
    assert measured.outcome == "ok", measured.detail
    assert measured.verification is not None
    assert measured.verification.bitwise_equal
    assert len(measured.samples_us) == 5
    assert measured.kernel is not None
    assert measured.kernel.local_bytes == 0  # nothing spills


@pytest.mark.gpus(2)
def test_finals_race_the_baseline_too(bench):
    pytest.importorskip("nvmath")
    problem = Problem(m=512, k=2048, h=2048, n=2048, gpus=2)
    configs = [default_config(problem), Baseline(), default_config(problem)]  # one twice
    rows = bench.finals(problem, configs, 5)
    assert [row.outcome for row in rows] == ["ok"] * 3, [row.detail for row in rows]
    assert len({len(row.samples_us) for row in rows}) == 1
    assert all(0 < row.gpu_state["energy_j"] < 10 for row in rows)


@pytest.mark.gpus(2)
@pytest.mark.parametrize("m", [1, 100, 384])
def test_every_baseline_is_right(bench, m):
    pytest.importorskip("nvmath")
    pytest.importorskip("nccl")
    problem = Problem(m=m, k=1024, h=2048, n=1024, gpus=2)
    for baseline in space.baselines(problem):
        measured = bench.trial(problem, baseline, 5)
        assert measured.outcome == "ok", (str(baseline), measured.detail)


@pytest.mark.gpus(2)
def test_a_config_that_does_not_fit_is_a_row(bench):
    problem = Problem(m=512, k=1024, h=1024, n=1024, gpus=2)
    measured = bench.trial(problem, replace(default_config(problem), stages=9), 5)
    assert measured.outcome == "invalid"
    assert "shared memory must be at most" in measured.detail


@pytest.mark.gpu
def test_two_tuners_on_one_gpu_are_refused(bench):
    from ctatune.errors import DeviceError

    assert bench.platform().sm_count > 0
    with pytest.raises(DeviceError, match="another ctatune measures"):
        Worker(1)
