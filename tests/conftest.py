"""Skips what needs GPUs where there are too few, with the reason, and shares the bench."""

from __future__ import annotations

import pytest

from ctatune.telemetry import gpu_count


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    present = gpu_count()
    for item in items:
        needed = 1 if item.get_closest_marker("gpu") else 0
        if marker := item.get_closest_marker("gpus"):
            needed = marker.args[0]
        if needed > present:
            reason = f"needs {needed} GPUs of sm_90, this machine has {present}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def bench():
    """The GPUs of this machine (2 at most), for tests marked gpu or gpus(n)."""
    from ctatune.measure import Bench

    return Bench(min(2, gpu_count()))
