"""How matrices lie in our memory: rows of weights and of Y1 begin with cache lines.

TMA asks L2 for two lines each 128 bytes of a row that does not. X and Y2 lie as callers want them.
"""

from __future__ import annotations

from typing import NamedTuple

from ctatune.problem import BF16_BYTES

L2_LINE_BYTES = 128


def pitch(columns: int) -> int:
    """Elements from one row of a weight or of Y1 to the next."""
    line = L2_LINE_BYTES // BF16_BYTES
    return -(-columns // line) * line


class Sizes(NamedTuple):
    """Of a product Y = X W^T: X is m x k, W is n x k, Y is m x n. A pitch is the elements from one
    row to the next."""

    m: int
    n: int
    k: int
    x_pitch: int
    w_pitch: int
    y_pitch: int

    @classmethod
    def up(cls, m: int, k: int, h: int) -> Sizes:
        """Of Y1 = X W_up^T."""
        return cls(m, h, k, k, pitch(k), pitch(h))

    @classmethod
    def down(cls, m: int, h: int, n: int) -> Sizes:
        """Of Y2 = Y1 W_down^T."""
        return cls(m, n, h, pitch(h), pitch(h), n)
