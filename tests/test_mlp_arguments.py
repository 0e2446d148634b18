"""What ctatune.Mlp refuses, and that it says so before anything is enqueued."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from mlp_fakes import MOST, NO_DB, OUT, W_DOWN, W_UP, H, K, N, OnGpu, X, enqueued, made, x_of

import ctatune
from ctatune import shared
from ctatune.errors import DeviceError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Fixed:
    """An array that nobody may write."""

    __cuda_array_interface__ = {  # noqa: RUF012
        "shape": (64, N),
        "typestr": "<u2",
        "data": (OUT, True),
        "version": 3,
    }


REFUSED = {
    "host": (lambda: ([np.zeros((64, K), np.uint16)],), "x must lie on GPU 0, it lies on the host"),
    "wrong gpu": (lambda: ([x_of(gpu=1)],), "x must lie on GPU 0, it lies on GPU 1"),
    "float": (lambda: ([OnGpu((64, K), X, code=2)],), "x must be bf16"),
    "width": (lambda: ([x_of(k=64)],), "x must be m x 128, got 64 x 64"),
    "one row": (lambda: ([OnGpu((K,), X)],), "x must be m x 128, got 128"),
    "too many": (lambda: ([x_of(601)],), r"m must be between 1 and 600 \(max_m\), got 601"),
    "none": (lambda: ([x_of(0)],), "m must be between 1 and 600"),
    "unaligned": (lambda: ([x_of(pointer=X + 8)],), "x must begin at a multiple of 16 bytes"),
    "no array": (lambda: ([3.0],), "x must be an array"),
    "out rows": (lambda: ([x_of(), OnGpu((63, N), OUT)],), "out must be 64 x 512, got 63 x 512"),
    "out gpu": (lambda: ([x_of(), OnGpu((64, N), OUT, 1)],), "out must lie on GPU 0"),
    "overlap": (lambda: ([x_of(), OnGpu((64, N), X + 256)],), "x and out must not overlap"),
    "one of two": (lambda: ([[x_of()]], {}), "x needs one item for each of 2 GPUs, got 1"),
    "tokens": (
        lambda: ([[x_of(), x_of(65, 1)]], {"stream": [7, 8]}),
        "x must be 64 x 128, got 65 x 128",
    ),
    "one stream": (
        lambda: ([[x_of(), x_of(gpu=1)]], {"stream": 7}),
        "stream needs one item for each of 2 GPUs, got 1",
    ),
    "one out": (
        lambda: ([[x_of(), x_of(gpu=1)], OnGpu((64, N), OUT)], {"stream": [7, 8]}),
        "out must be a list of 2, as x is, got OnGpu",
    ),
    "no stream": (lambda: ([x_of()], {"stream": "x"}), "stream must be a handle .* got 'x'"),
    "stream": (lambda: ([x_of()], {"stream": -1}), "stream must be a handle .* got -1"),
    "read-only": (lambda: ([x_of(), Fixed()],), "out must not be read-only"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_call_refuses_is_said_before_anything_is_enqueued(machine, name):
    make, message = REFUSED[name]
    args, *named = make()
    it = made()
    machine.log.clear()
    with pytest.raises(UsageError, match=message):
        it(*args, **(named[0] if named else {"stream": 7}))
    assert enqueued(machine.log) == []


@pytest.mark.usefixtures("machine")
def test_the_y_of_an_object_is_no_x_of_the_same():
    square = ctatune.Mlp(np.zeros((H, N), np.uint16), W_DOWN, gpus=2, max_m=MOST, db=NO_DB)
    y = square(x_of(k=N), stream=7)
    with pytest.raises(UsageError, match="nor may x be the y of the same Mlp"):
        square(y, stream=7)


WRONG = {
    "sizes": ((W_UP, W_UP), {"gpus": 2}, r"w_up must be h x k and w_down n x h, got 768 x 128 and"),
    "dtype": ((W_UP.astype(np.float32), W_DOWN), {"gpus": 2}, "w_up must be bf16"),
    "strided": ((W_UP, W_DOWN[:, ::2]), {"gpus": 2}, "w_down must be contiguous"),
    "no gpus": ((W_UP, W_DOWN), {}, r"say how many gpus \(1 \.\. 8\)"),
    "gpus": ((W_UP, W_DOWN), {"gpus": 9}, "gpus must be between 1 and 8"),
    "k": ((W_UP[:, :100].copy(), W_DOWN), {"gpus": 2}, "k must be a multiple of 8"),
    "far": ((OnGpu((H, K), X, 2), W_DOWN), {"gpus": 2}, "w_up must lie on the host or one of 2"),
}


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("name", WRONG)
def test_weights_that_cannot_be(name):
    weights, rest, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        ctatune.Mlp(*weights, **rest)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("shape", "rest", "message"),
    [
        ("64x128x768x256", {}, "the choice is for 64x128x768x256, the weights have"),
        ("64x128x768x512", {"gpus": 1}, "the choice is for 2 GPUs, gpus is 1"),
        ("64x128x768x512", {"max_m": 63}, "max_m must be at least 64"),
    ],
)
def test_a_choice_that_does_not_fit(shape, rest, message):
    choice = ctatune.best(shape, gpus=2, db=NO_DB)
    with pytest.raises(UsageError, match=message):
        ctatune.Mlp(W_UP, W_DOWN, choice, **rest)
    fitting = ctatune.best("64x128x768x512", gpus=2, db=NO_DB)
    assert ctatune.Mlp(W_UP, W_DOWN, fitting).plan(64).config == fitting.config


def test_a_missing_gpu_is_an_error_of_one_line(monkeypatch):
    monkeypatch.setattr(shared, "_made", {})
    monkeypatch.setattr(shared, "gpu_count", lambda: 1)
    with pytest.raises(DeviceError, match="2 GPUs are asked for, this machine has 1"):
        made()
    monkeypatch.setattr(shared, "_made", {range(4): None, range(1): None})
    with pytest.raises(UsageError, match="this process uses 4 GPUs for an Mlp, not 2"):
        made()


def test_import_is_free_of_cuda():
    code = "import sys, ctatune; assert not {m for m in sys.modules if m.startswith('cuda')}"
    subprocess.run([sys.executable, "-c", code], check=True)
