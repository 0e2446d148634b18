"""Mlp.for_rank in two processes: the bits of one process, graphs, memory that comes and goes."""

from __future__ import annotations

import numpy as np
import pytest
from rank_rig import MOST, contexts, in_two_processes, left_alone, one_process, run_job

pytestmark = pytest.mark.gpus(2)


def numbers(count: int) -> list[int]:
    """Random ones, and edges of tiles."""
    rng = np.random.default_rng(3)
    return [1, 64, 65, *(int(m) for m in rng.integers(1, MOST + 1, count - 4)), MOST]


@pytest.mark.parametrize("axis", ["n", "h"])
@pytest.mark.parametrize("job", ["in_flight", "replayed", "evicted"])
def test_two_processes_give_the_bits_of_one(job, axis):
    """The one process comes first: it compiles, within no time limit."""
    some = numbers(10 if job == "in_flight" else 6)
    wanted = one_process(job, axis, some)
    for found in in_two_processes(run_job, job, axis, some):
        assert found == [wanted, wanted]


def test_a_peer_that_stops_is_a_timeout():
    said, other = in_two_processes(left_alone)
    assert other == "gone"
    assert "GPU 0 waited more than 2 s" in said


@pytest.mark.real
def test_a_rank_has_a_context_on_its_own_gpu_alone():
    assert in_two_processes(contexts) == [[0], [1]]
