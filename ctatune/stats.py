"""Medians of few samples and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BOOTSTRAP = 2_000


def median_interval(samples: NDArray[np.float64] | Sequence[float]) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval (seeded, so the same samples give the same text)."""
    values = np.asarray(samples, dtype=np.float64)
    draws = np.random.default_rng(0).integers(0, len(values), (BOOTSTRAP, len(values)))
    low, high = np.percentile(np.median(values[draws], axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Median ratio of latencies of the same interleaved rounds, and its 95 % interval."""
    middle, low, high = np.exp(median_interval(np.log(ours) - np.log(theirs)))
    return float(middle), float(low), float(high)
