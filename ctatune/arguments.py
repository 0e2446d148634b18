"""What callers give to an `Mlp`, checked before anything is enqueued."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from ctatune.arrays import Place, View, current_stream, where
from ctatune.choice import Choice
from ctatune.errors import UsageError
from ctatune.limits import ALIGNMENT_BYTES, why_invalid
from ctatune.problem import MAX_GPUS, Problem, parse_shape
from ctatune.space import default_config

MAX_M = 4096


def problem_of(
    up: View, down: View, choice: Choice | None, gpus: int | None, max_m: int | None
) -> Problem:
    """The problem of the most tokens that weights, choice and caller describe together."""
    if len(up.shape) != 2 or len(down.shape) != 2 or up.shape[0] != down.shape[1]:
        shapes = f"{_sizes(up.shape)} and {_sizes(down.shape)}"
        raise UsageError(f"w_up must be h x k and w_down n x h, got {shapes}")
    (h, k), n = up.shape, down.shape[0]
    least = 1
    if choice:
        least, gpus = _agree(choice, (k, h, n), gpus)
    if gpus is None:
        raise UsageError(f"say how many gpus (1 .. {MAX_GPUS}), or give a choice")
    most = max(MAX_M, least) if max_m is None else max_m
    if most < least:
        raise UsageError(f"max_m must be at least {least}, the tokens of the choice, got {most}")
    problem = Problem(m=most, k=k, h=h, n=n, gpus=gpus)
    if reason := why_invalid(default_config(problem), problem):
        raise UsageError(f"our kernel cannot run {problem.shape}: {reason}")
    return problem


def _agree(choice: Choice, sizes: tuple[int, int, int], gpus: int | None) -> tuple[int, int]:
    """The tokens and the GPUs of a choice, if it is for an Mlp of these sizes."""
    m, *chosen = parse_shape(choice.shape)
    if tuple(chosen) != sizes:
        have = "x".join(map(str, sizes))
        raise UsageError(f"the choice is for {choice.shape}, the weights have k x h x n {have}")
    if (choice.dtype, choice.activation, choice.output) != ("bf16", "none", "replicated"):
        got = f"{choice.dtype}, {choice.activation}, {choice.output}"
        raise UsageError(f"an Mlp runs bf16, none, replicated; the choice is for {got}")
    if gpus not in (None, choice.gpus):
        raise UsageError(f"the choice is for {choice.gpus} GPUs, gpus is {gpus}")
    return m, choice.gpus


def require_weights_on(gpus: range, up: View, down: View) -> None:
    """Raise UsageError unless weights lie on the host or on one of these GPUs."""
    for name, weight in (("w_up", up), ("w_down", down)):
        if weight.gpu is not None and weight.gpu not in gpus:
            which = f"one of {gpus.stop} GPUs" if gpus.start == 0 else f"GPU {gpus.start}"
            raise UsageError(f"{name} must lie on the host or {which}: {where(weight.gpu)}")


def tokens(m: Any, problem: Problem) -> int:
    """`m` as a number of tokens that a call may have."""
    m = operator.index(m)
    if not 1 <= m <= problem.m:
        raise UsageError(f"m must be between 1 and {problem.m} (max_m), got {m}")
    return m


def streams_of(stream: Any, gpus: range) -> list[int]:
    """Handles of streams on these GPUs: those given, or the caller's current ones."""
    if stream is None:
        return [current_stream(gpu) for gpu in gpus]
    given = stream if isinstance(stream, (list, tuple)) else (stream,)
    require_each("stream", given, len(gpus))
    return [one if type(one) is int and one >= 0 else _handle(one) for one in given]


def _handle(stream: Any) -> int:
    try:
        handle = int(getattr(stream, "cuda_stream", stream))
    except (TypeError, ValueError):
        handle = -1
    if handle < 0:
        raise UsageError(f"stream must be a handle or have a `cuda_stream`, got {stream!r}")
    return handle


def require_each(name: str, items: Any, gpus: int) -> None:
    """Raise UsageError unless there is one item for each GPU, in a list or a tuple."""
    if not isinstance(items, (list, tuple)):
        raise UsageError(f"{name} must be a list of {gpus}, as x is, got {type(items).__name__}")
    if len(items) != gpus:
        raise UsageError(f"{name} needs one item for each of {gpus} GPUs, got {len(items)}")


def tokens_of(gpus: range, x: Sequence[Place], out: Sequence[Place], problem: Problem) -> int:
    """How many tokens a call has whose X and Y2 lie there, on the first of these GPUs."""
    m = None
    for name, places, width in (("x", x, problem.k), ("out", out, problem.n)):
        for gpu, (pointer, shape, lies_on) in zip(gpus, places, strict=False):
            if lies_on != gpu:
                raise UsageError(f"{name} must lie on GPU {gpu}, it lies on {where(lies_on)}")
            if len(shape) != 2 or shape[1] != width or m not in (None, shape[0]):
                rule = f"{'m' if m is None else m} x {width}"
                raise UsageError(f"{name} must be {rule}, got {_sizes(shape)}")
            if pointer % ALIGNMENT_BYTES:
                raise UsageError(
                    f"{name} must begin at a multiple of {ALIGNMENT_BYTES} bytes (TMA)"
                )
            m = tokens(shape[0], problem)
    assert m is not None
    return m


def _sizes(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
