"""Medians of few samples and how sure they are. NumPy is imported where it is needed: an answer
seldom needs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BOOTSTRAP = 2_000
APART = 0.01  # of a log-ratio: what is closer is as good as equal (DESIGN 6)

Verdict = Literal["faster", "slower", "tie"]


def median_interval(samples: NDArray[np.float64] | Sequence[float]) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval (seeded, so the same samples give the same text)."""
    import numpy as np

    values = np.asarray(samples, dtype=np.float64)
    draws = np.random.default_rng(0).integers(0, len(values), (BOOTSTRAP, len(values)))
    low, high = np.percentile(np.median(values[draws], axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Median ratio of latencies of the same interleaved rounds, and its 95 % interval.

    Raises: ValueError unless there are some, as many of each, all positive and finite.
    """
    import numpy as np

    if not 0 < len(ours) == len(theirs) or not all(0.0 < us < math.inf for us in (*ours, *theirs)):
        raise ValueError("latencies must be of the same rounds, positive and finite")
    middle, low, high = np.exp(median_interval(np.log(ours) - np.log(theirs)))
    return float(middle), float(low), float(high)


def verdict(ratio: float, low: float, high: float) -> Verdict:
    """What may be said of a latency that is `ratio` times another one's, `low` to `high` with 95 %.

    A difference is said only when it is at least APART and the interval lies on the same side.
    """
    if high < 1.0 and ratio <= math.exp(-APART):
        return "faster"
    return "slower" if low > 1.0 and ratio >= math.exp(APART) else "tie"


def slower_in_each(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether all rounds, as many of each, say `slower`: then so does every resample of them."""
    return all(own >= math.exp(APART) * their for own, their in zip(ours, theirs, strict=True))
