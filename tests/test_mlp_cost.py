"""What a call of ctatune.Mlp costs on two GPUs: host time, latency against `bench`, memory.

`--junitxml FILE` keeps the numbers. Memory is looked at over ten times $CTATUNE_TEST_CALLS calls
(issue 6 asks for 100000 of them).
"""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from mlp_rig import CALLS, SMALL, WIDE, Rig, rigged, some_tokens

from ctatune.arrays import GpuArray
from ctatune.contestants import Contestants
from ctatune.gpus import check
from ctatune.problem import BF16_BYTES, Problem
from ctatune.timing import Timer

HOST_US = 15.0
pytestmark = pytest.mark.gpus(2)


@pytest.fixture(scope="module")
def small(bench) -> Iterator[Rig]:
    with rigged(bench, SMALL) as rig:
        yield rig


@pytest.fixture(scope="module")
def wide(bench) -> Iterator[Rig]:
    with rigged(bench, WIDE) as rig:
        yield rig


def test_memory_does_not_grow(small):
    from cuda.bindings import driver

    tokens = some_tokens(small)

    def free() -> list[int]:
        small.gpus.sync()
        small.mlp.check()
        found = []
        for gpu in range(2):
            small.gpus.use(gpu)
            found.append(int(check(driver.cuMemGetInfo())[0]))
        return found

    def calls(count: int) -> None:
        for i in range(count):
            m, row = tokens[i % len(tokens)], 16 * (i % 100)
            x = GpuArray(small.reference.x + row * small.k * BF16_BYTES, (m, small.k), 0, None)
            small.mlp(x, stream=small.streams[0])

    calls(400)
    before = free()
    calls(10 * CALLS)
    assert free() == before


@pytest.mark.real
@pytest.mark.parametrize("everywhere", [False, True], ids=["x on GPU 0", "x everywhere"])
def test_host_time_of_a_call(small, everywhere, record_property):
    """Enqueueing alone: the queue of a stream is never full."""
    some_tokens(small)
    x = [small.x_of(16, gpu) for gpu in range(2)]
    args, streams = (x, small.streams) if everywhere else (x[0], small.streams[0])
    rounds_us = []
    for _ in range(30):
        small.gpus.sync()
        begin = time.perf_counter_ns()
        for _ in range(50):
            small.mlp(args, stream=streams)
        rounds_us.append((time.perf_counter_ns() - begin) / 50e3)
    record_property("host_us", rounds_us)
    assert np.median(rounds_us) <= HOST_US, (np.median(rounds_us), min(rounds_us))


@pytest.mark.real
@pytest.mark.parametrize("m", [64, 1024])
def test_latency_is_that_of_bench(bench, wide, m, record_property):
    """By the same protocol, interleaved: no pause before a chain, its floor subtracted."""
    wide.mlp.warm_up(m)
    problem = Problem(m=m, k=wide.k, h=wide.h, n=wide.n, gpus=2)
    xs = [wide.x_of(m, gpu) for gpu in range(2)]
    for gpu in range(2):
        wide.fill(gpu, 0, m)

    def everywhere(_: int) -> None:
        wide.mlp(xs, stream=wide.streams)

    def on_one(_: int) -> None:
        wide.mlp(xs[0], stream=wide.streams[0])

    with bench.gpus.arena() as arena:
        timer = Timer(bench.gpus, arena)
        config = wide.mlp.plan(m).config
        theirs = Contestants(bench.gpus).prepare(arena, problem, config, 1).call
        calls = timer.calls_for(theirs)
        fields = {"bench": theirs, "x everywhere": everywhere, "x on GPU 0": on_one}
        found: dict[str, list[float]] = {name: [] for name in fields}
        for i in range(15):
            for name, call in fields.items():
                call_us = timer.steady(call, calls, 0.1 if i else 0.5)
                if call_us is not None:
                    found[name].append(timer.less_floor(call_us, calls).latency_us)
    median = {name: float(np.median(times)) for name, times in found.items()}
    record_property("latency_us", median)
    assert median["x everywhere"] <= 1.02 * median["bench"], median
