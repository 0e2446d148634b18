"""The child that owns the GPUs: whatever it does, the search goes on."""

from __future__ import annotations

import re
from functools import partial

import pytest
from fakes import FakeBench

from ctatune import worker
from ctatune.config import Tile
from ctatune.errors import DeviceError
from ctatune.problem import Problem
from ctatune.space import candidates, default_config
from ctatune.worker import Worker

PROBLEM = Problem(m=1024, k=8192, h=8192, n=8192, gpus=2)
GOOD = default_config(PROBLEM)
NARROW = next(c for c in candidates(PROBLEM) if c.up == Tile(m=128, n=128))


@pytest.mark.parametrize(
    ("bad", "outcome", "detail"),
    [
        ("hang", "timeout", "no answer in 0.5 s"),
        ("die", "launch_error", r"died \(exit 7\)"),
        ("break", "launch_error", "CUDA_ERROR_LAUNCH_FAILED"),
        ("wrong", "wrong", "3 NaNs"),
    ],
)
def test_a_bad_candidate_is_a_row_and_the_next_one_is_measured(monkeypatch, bad, outcome, detail):
    monkeypatch.setattr(worker, "TRIAL_SECONDS", 0.5)
    with Worker(2, partial(FakeBench, bad)) as child:
        lost = child.trial(PROBLEM, NARROW, 1)
        assert lost.outcome == outcome
        assert re.search(detail, lost.detail)
        monkeypatch.setattr(worker, "TRIAL_SECONDS", 20)
        assert child.trial(PROBLEM, GOOD, 1).outcome == "ok"


def test_a_machine_that_cannot_measure_says_why():
    with pytest.raises(DeviceError, match="2 GPUs are asked for"):
        Worker(2, partial(FakeBench, start="2 GPUs are asked for, this machine has 1"))
