"""Skips what needs GPUs where there are too few, with the reason, and shares the bench.

$CTATUNE_TEST_RANKS ranks share a GPU, so that two GPUs can run what is for four; tests marked
`real` need GPUs of their own.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from ctatune.telemetry import gpu_count

# Before NumPy comes: small products on threads of several processes wait for each other, ten times
# as long as they compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

RANKS = int(os.environ.get("CTATUNE_TEST_RANKS", "1"))
MOST = 4  # that any test asks for


def available() -> int:
    """GPUs, or ranks that stand for them."""
    return min(MOST, gpu_count() * RANKS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needed = 1 if item.get_closest_marker("gpu") else 0
        if marker := item.get_closest_marker("gpus"):
            needed = marker.args[0]
        if needed:  # one process at a time has the GPUs
            item.add_marker(pytest.mark.xdist_group("gpu"))
        if needed > available():
            reason = f"needs {needed} GPUs of sm_90, this machine has {available()}"
            item.add_marker(pytest.mark.skip(reason=reason))
        elif RANKS > 1 and item.get_closest_marker("real"):
            item.add_marker(pytest.mark.skip(reason="ranks share a GPU"))


@pytest.fixture(scope="session")
def bench():
    """The GPUs of this machine, for tests marked gpu or gpus(n)."""
    from ctatune.measure import Bench

    return Bench(available(), ranks=RANKS)


@pytest.fixture
def machine(monkeypatch) -> Any:
    """Two fake GPUs for `ctatune.Mlp`, and the log of what is enqueued on them."""
    from mlp_fakes import fake_machine

    return fake_machine(monkeypatch)


@pytest.fixture
def pair(monkeypatch) -> Any:
    """Two ranks, which are threads, for `ctatune.Mlp.for_rank`."""
    from rank_fakes import fake_ranks

    return fake_ranks(monkeypatch)
