"""Runs an MLP on several GPUs, of one process or of one process each, as `ctatune.best` says.

Why calls of different numbers of tokens may share Y1, though each has flags of its own, and epochs
that count its own calls (the protocol stands in `kernels/mlp.cu`):

1. Calls form one sequence, the same on every GPU: in one process `shared.py` sees to it. Ranks
   (`ranks.py`) must make the same calls in the same order, and each puts its own into a sequence.
2. Y2 lies on every GPU after a call (`replicated`), so a kernel ends only when all CTAs of all
   GPUs with a part of `down` have added to its `arrived`. A CTA adds after its last tile, when it
   has loaded all that it will load. And each panel of Y1 was awaited by a GPU with a part of
   `down`, so every tile of `up` had been stored, and its X loaded. Hence: when a call has ended on
   any one GPU, every GPU has read all of X and Y1 that it reads in this call. Where Y2 is summed
   over GPUs, partial sums were awaited too: they were stored, and what they sum was read.
3. A kernel writes nothing before the one before it on its GPU has ended. So by 2, when the first
   GPU writes Y1 of the next call, nobody reads or writes Y1 of an earlier one, whatever the number
   of tokens and the layout of both.
4. Y2 is stored only into a GPU that has started the same call (`started` of this schedule), so
   after all that the GPU's stream did before: a rank's copy of the Y2 before it, for example.
5. What is left are counters. Those of a schedule are touched by its own calls alone, which are a
   sequence too, as the kernel's protocol asks; a call of another schedule between two of them only
   makes a GPU later. Ranks meet between the zeroing of counters and the first call.

This rests on `replicated`: another output would need `started` flags that count the calls of all
schedules. (tests/test_sequence.py runs the protocol in random order.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from ctatune.arguments import (
    problem_of,
    require_each,
    require_weights_on,
    streams_of,
    tokens,
)
from ctatune.arrays import View, view
from ctatune.choice import Choice
from ctatune.errors import DeviceError, PipelineTimeoutError, UsageError
from ctatune.placement import Key, Placement
from ctatune.plans import Plan, Plans
from ctatune.problem import Problem
from ctatune.ranks import Exchange, Processes, Ranks
from ctatune.shared import shared

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _exclusive(method: _Method) -> _Method:
    """One thread at a time, not after `close`; the caller's current GPU stays what it was."""

    @wraps(method)
    def guarded(self: Mlp, *args: Any, **named: Any) -> Any:
        with self._shared:
            self._require_open()
            return method(self, *args, **named)

    return guarded  # pyright: ignore[reportReturnType]


class Mlp:
    """`Y2 = X W_up^T W_down^T` in bf16, on GPUs 0 .. `gpus` - 1 of this process. (`Mlp.for_rank` is
    for one process for each GPU.)

    Weights are whole, on the host or on one GPU: arrays of torch, DLPack,
    `__cuda_array_interface__` or NumPy (uint16 with the bits of bf16, which NumPy does not have).
    Each GPU gets a copy of its part; the caller's arrays are not needed any more.

    `choice` is an answer of `ctatune.best` for these weights: its config runs for its number of
    tokens, and weights are divided as it divides them. For other numbers, and without it, `best`
    (of `db` and `platform`) is asked for the best of our kernel, about the next power of two unless
    just so many were measured, and weights are divided evenly in multiples of 256 columns. For a
    config that the division excludes stands in the one that takes least at most (`plans.py`).

    The first call with a number of tokens makes a schedule, compiles a kernel if it is new (5 s),
    and allocates; `warm_up` does that before. A later call allocates nothing on a GPU. Threads
    may share an object: their calls are serialised.

    Shapes: w_up h x k, w_down n x h.
    Units: `max_m` in tokens, the most of a call (None: 4096, or those of `choice` if more).
    Raises: UsageError for arrays or sizes that cannot be; DeviceError for GPUs that are missing or
    have no peer access.
    """

    _closed, _failed = True, ""

    def __init__(
        self,
        w_up: Any,
        w_down: Any,
        choice: Choice | None = None,
        *,
        gpus: int | None = None,
        max_m: int | None = None,
        db: Path | None = None,
        platform: str | None = None,
    ) -> None:
        views = view(w_up, "w_up"), view(w_down, "w_down")
        problem = problem_of(*views, choice, gpus, max_m)
        plans = Plans(problem, choice, db, platform)
        self._begin(views, problem, plans, range(problem.gpus), Processes(range(problem.gpus)))
        self._place(*views)

    @classmethod
    def for_rank(  # noqa: PLR0913
        cls,
        rank: int,
        world: int,
        w_up: Any,
        w_down: Any,
        choice: Choice | None = None,
        *,
        exchange: Exchange,
        gpu: int | None = None,
        max_m: int | None = None,
        db: Path | None = None,
        platform: str | None = None,
    ) -> Mlp:
        """An Mlp over the GPUs of `world` processes, of which this one is number `rank`.

        `exchange` gives what each rank gave, in the order of ranks: an all-gather of bytes on the
        host, of torch.distributed for example. It must raise some day when a rank is gone. `gpu`
        is the ordinal of this rank's GPU in this process (None: `rank`). Weights are whole, on the
        host or that GPU, and the same on each rank. `choice`, `db` and `platform` of rank 0 count.

        All ranks make the same calls with the same numbers of tokens in the same order, in which X
        is the same on each. `warm_up` and `close` are collective, and so is what comes first for a
        number of tokens, `plan` or a call: a rank that does or refuses it alone leaves the others
        waiting. In `y = mlp(x, out)` arrays and the stream are those of this rank's GPU, and its
        part goes onto that stream alone. Peers store Y2 into memory of ours, which `y` shows
        without `out`; with `out`, it is copied there on the same stream.

        Raises: what `Mlp` does, on every rank when one fails; UsageError when ranks do not agree,
        DeviceError when their GPUs do not reach each other; what `exchange` raises.
        """
        made, views = cls.__new__(cls), list[View]()
        ranks, own = Ranks(rank, world, exchange), rank if gpu is None else gpu
        first = ranks.choice(choice)

        def begin() -> str:
            up, down = view(w_up, "w_up"), view(w_down, "w_down")
            views[:] = up, down
            problem = problem_of(up, down, first, world, max_m)
            plans = Plans(problem, first, db, platform)
            made._begin(views, problem, plans, range(own, own + 1), ranks)
            return problem.shape

        ranks.same("the shape with the most tokens", begin)
        made._place(*views)
        return made

    def _begin(
        self,
        weights: Sequence[View],
        problem: Problem,
        plans: Plans,
        gpus: range,
        ranks: Processes,
    ) -> None:
        require_weights_on(gpus, *weights)
        self.problem, self._gpus, self._shared = problem, gpus, shared(gpus)
        self._placement = Placement(self._shared, gpus, ranks, problem, plans)

    def _place(self, up: View, down: View) -> None:
        self._closed = False
        try:
            with self._shared:
                self._placement.place(up, down)
        except BaseException:
            self.close()
            raise

    @_exclusive
    def plan(self, m: int) -> Plan:
        """The config that runs for m tokens, and how it was chosen."""
        return self._placement.plan(tokens(m, self.problem))

    def __call__(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Y2 of X, enqueued: `out`, or a `GpuArray` that the next call of this object overwrites.

        With X on GPU 0 a call is one piece of work on the caller's stream there: the handle
        `stream`, else torch's current stream if torch is in use, else the legacy default stream.
        The other GPUs fetch X. With a list, the same X on each GPU, the part of each GPU goes to
        the caller's stream on that GPU, with no copies and no waits of one stream for another;
        then `out`, `stream` and the result are lists too, the same Y2 on each GPU.

        A GPU whose stream comes to a call 2 s after another one's fails it: `check` says so. A
        stream must live until the next call, which waits for it if it is on another one.

        A call with X on one GPU may be captured into a CUDA graph, after `warm_up`, in one thread
        at a time. Replays need this object open, and the caller orders them with other calls of
        this process, as by one stream for all.

        Shapes: x m x k, out m x n; contiguous bf16, aligned to 16 bytes, not overlapping.
        Raises: UsageError before anything is enqueued; at a new number of tokens what `warm_up`
        raises, but for timeouts; DeviceError when the driver refuses a part, or has refused one of
        an earlier call, or `check` has found a timeout: then some GPUs may wait for others in vain.
        """
        if not isinstance(x, (list, tuple)):
            streams = streams_of(stream, self._gpus[:1])
            return self._enqueue([x], [] if out is None else [out], streams)[0]
        for name, items in (("x", x), ("out", x if out is None else out)):
            require_each(name, items, len(self._gpus))
        streams = streams_of(stream, self._gpus)
        return list(self._enqueue(x, [] if out is None else out, streams))

    def _enqueue(self, x: Sequence[Any], out: Sequence[Any], streams: list[int]) -> Sequence[Any]:
        with self._shared.lock:
            self._require_open()
            at = tuple([view(array, "x", streams[gpu])[:3] for gpu, array in enumerate(x)])
            to = tuple([view(array, "out", streams[gpu])[:3] for gpu, array in enumerate(out)])
            captured = self._shared.capturing(streams)
            y = self._run((captured, tuple(streams), at, to))
        return out or y

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("this Mlp is closed")

    def _run(self, key: Key) -> Sequence[Any]:
        """Enqueue a call; gives Y2 in our own memory."""
        if self._failed:
            raise DeviceError(f"{self._failed}: make a new Mlp, this one lost count")
        call = self._placement.call(key)
        try:
            self._shared.enqueue(call.listed)
        except BaseException as error:  # some GPUs may have begun without the others
            captured, *_ = key
            if not captured:
                self._failed = f"a call was lost ({str(error) or type(error).__name__})"
            raise
        return call.y

    @_exclusive
    def warm_up(self, *numbers: int) -> None:
        """Make these numbers of tokens ready, with one call of each, and wait for it.

        Raises: UsageError when no config can run; CompileError; DeviceError, as when memory is
        used up; PipelineTimeoutError.
        """
        streams = (int(self._shared.gpus.streams[0].handle),)
        for m in numbers:
            x = self._placement.own_x(tokens(m, self.problem))
            self._run((False, streams, (x,), ()))
        self.check()

    @_exclusive
    def check(self) -> None:
        """Wait for the last call (not for replays of graphs), and say whether one has failed. No
        thread of this process enqueues a call meanwhile.

        Raises: PipelineTimeoutError when a GPU waited in vain for another one: Y2 of that call and
        of all after it means nothing, and this object takes no more calls.
        """
        self._shared.wait()
        try:
            self._placement.raise_poll_error()
        except PipelineTimeoutError as error:
            self._failed = str(error)
            raise

    def close(self) -> None:
        """Wait for all work on the GPUs and free the memory, which nothing else does: outputs of
        ours and graphs that hold calls are void."""
        if self._closed:  # perhaps it never came to have GPUs
            return
        with self._shared:
            if not self._closed:
                self._closed = True
                self._placement.close()

    def __enter__(self) -> Mlp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
