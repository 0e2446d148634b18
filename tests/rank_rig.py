"""Two processes as the ranks of an Mlp, for tests that need GPUs; what they give is digests of Y2.

What runs in them is here, since children import it. Where ranks share a GPU (conftest.py), so do
the processes, which the driver then runs in turns of milliseconds.
"""

# cuda-python ships no type stubs.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import ctatune
from ctatune import shared
from ctatune.abi import bf16_bits
from ctatune.arrays import GpuArray
from ctatune.config import Config, Tile
from ctatune.errors import DeviceError, PipelineTimeoutError
from ctatune.gpus import Arena, Gpus, check
from ctatune.problem import BF16_BYTES
from ctatune.ranks import Ranks

K, H, N, MOST = 512, 1024, 768, 4096
EXCHANGE_S, WHOLE_S = 20, 45  # what waits, at most
SHARED = int(os.environ.get("CTATUNE_TEST_RANKS", "1")) > 1
Digests = dict[str, str]


def bits_of(rows: int, columns: int, seed: int, scale: float = 1.0) -> Any:
    """The same random matrix in every process."""
    values = np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    return bf16_bits(values * np.float32(scale))


def weights() -> tuple[Any, Any]:
    return bits_of(H, K, 1, K**-0.5), bits_of(N, H, 2, H**-0.5)


def choice(axis: str) -> ctatune.Choice | None:
    """None where Y2 is not summed over GPUs: then the default is for that."""
    if axis == "n":
        return None
    tile = Tile(m=128, n=128)
    config = Config(up=tile, down=tile, stages=4, d_slabs=2, mix=1.0, down_axis="h")
    return replace(ctatune.best(f"64x{K}x{H}x{N}", gpus=2), config=config)


def share_a_gpu(ranks: int) -> None:
    """Let an Mlp of two GPUs in this process find ranks that share one."""
    if range(2) not in shared._made:
        shared._made[range(2)] = shared.Shared(Gpus(2, ranks=ranks))


class Host:
    """An Mlp with X and Y2 on the first GPU of its process, one pair for each number of tokens."""

    def __init__(self, mlp: ctatune.Mlp) -> None:
        self.mlp, self.gpus = mlp, mlp._shared.gpus
        self.ordinal = mlp._gpus[0]
        self.arena = Arena(self.gpus)
        self.gpus.use(0)
        self._stream = self.gpus.devices[0].create_stream()
        self.stream = int(self._stream.handle)
        self.at: dict[int, tuple[GpuArray, GpuArray]] = {}

    def pair(self, m: int) -> tuple[GpuArray, GpuArray]:
        """X and room for Y2 of m tokens."""
        if m not in self.at:
            x = self.arena.upload(0, bits_of(m, K, m))
            y = self.arena.alloc(0, m * N * BF16_BYTES)
            ends = GpuArray(x, (m, K), self.ordinal, None), GpuArray(y, (m, N), self.ordinal, None)
            self.at[m] = ends
        return self.at[m]

    def new_x(self, m: int, seed: int) -> None:
        """Other numbers in the same X."""
        from cuda.bindings import driver

        bits = bits_of(m, K, seed)
        self.gpus.use(0)
        to = self.pair(m)[0].view.pointer
        check(driver.cuMemcpyHtoDAsync(to, bits.ctypes.data, bits.nbytes, self.stream))
        check(driver.cuStreamSynchronize(self.stream))

    def digest(self, y: GpuArray) -> str:
        from cuda.bindings import driver

        self.gpus.use(0)
        check(driver.cuStreamSynchronize(self.stream))
        bits = self.gpus.download(0, y.view.pointer, y.shape, np.uint16)
        return hashlib.sha256(bits.tobytes()).hexdigest()


def in_flight(host: Host, numbers: Sequence[int]) -> Digests:
    """Three calls of each number in turn, with no wait between; the last one is not copied."""
    for _ in range(2):
        for m in numbers:
            host.mlp(*host.pair(m), stream=host.stream)
    found = {f"{m}": host.digest(host.pair(m)[1]) for m in numbers}
    for m in numbers:
        y = host.mlp(host.pair(m)[0], stream=host.stream)
        found[f"{m} shown"] = host.digest(y)
    host.mlp.check()
    return found


def replayed(host: Host, numbers: Sequence[int]) -> Digests:
    """Two calls a graph, replayed with other inputs, and calls between."""
    from cuda.bindings import driver

    found = {}
    host.mlp.warm_up(*numbers)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    for m in numbers:
        x, y = host.pair(m)
        host.gpus.use(0)
        check(driver.cuStreamBeginCapture(host.stream, mode))
        for _ in range(2):
            host.mlp(x, y, stream=host.stream)
        host.gpus.use(0)
        graph = check(driver.cuStreamEndCapture(host.stream))
        whole = check(driver.cuGraphInstantiate(graph, 0))
        for seed in range(5):
            host.new_x(m, 1000 + seed)
            check(driver.cuGraphLaunch(whole, host.stream))
            found[f"{m} replay {seed}"] = host.digest(y)
            host.mlp(x, y, stream=host.stream)
            found[f"{m} call {seed}"] = host.digest(y)
    host.mlp.check()
    return found


def evicted(host: Host, numbers: Sequence[int]) -> Digests:
    """More numbers than stay ready, twice."""
    from ctatune import placement

    placement.SCHEDULES = 4
    found = {}
    for m in [*numbers, *numbers]:
        host.mlp(*host.pair(m), stream=host.stream)
        found[f"{m}"] = host.digest(host.pair(m)[1])
    host.mlp.check()
    return found


JOBS = {job.__name__: job for job in (in_flight, replayed, evicted)}


def done(mlp: ctatune.Mlp, job: str, numbers: Sequence[int]) -> Digests:
    """What a job gives, and the plans that ran."""
    host = Host(mlp)
    found = JOBS[job](host, numbers) | {f"plan of {m}": str(mlp.plan(m)) for m in numbers}
    mlp._shared.drain()
    host.arena.close()
    return found


def one_process(job: str, axis: str, numbers: Sequence[int]) -> Digests:
    """What one process with both GPUs gives."""
    from ctatune import placement

    kept = placement.SCHEDULES
    if SHARED:
        share_a_gpu(2)
    try:
        with warnings.catch_warnings(), ctatune.Mlp(*weights(), choice(axis), gpus=2) as mlp:
            warnings.simplefilter("ignore")
            return done(mlp, job, numbers)
    finally:
        placement.SCHEDULES = kept


def exchange_over(rank: int, link: Any) -> Callable[[bytes], list[bytes]]:
    def exchange(message: bytes) -> list[bytes]:
        link.send_bytes(message)
        if not link.poll(EXCHANGE_S):
            raise TimeoutError(f"rank {1 - rank} says nothing")
        said = [message, link.recv_bytes()]
        return said if rank == 0 else said[::-1]

    return exchange


def of_rank(rank: int, link: Any, axis: str = "n") -> ctatune.Mlp:
    """Rank 0 alone knows of the choice."""
    mine = choice(axis) if rank == 0 else None
    exchange = exchange_over(rank, link)
    if SHARED:
        Ranks.gather = as_if_apart  # pyright: ignore[reportAttributeAccessIssue]
    gpu = 0 if SHARED else rank
    return ctatune.Mlp.for_rank(rank, 2, *weights(), mine, exchange=exchange, gpu=gpu)


gather = Ranks.gather


def as_if_apart(ranks: Ranks, what: str, make: Callable[[], Any]) -> list[Any]:
    """Ranks that share a GPU do not tell each other."""
    if what == "connecting":
        return gather(ranks, what, lambda: f"{make()} of rank {ranks.here[0]}")
    return gather(ranks, what, make)


def run_job(rank: int, link: Any, job: str, axis: str, numbers: Sequence[int]) -> list[Digests]:
    """The job by two objects: the second one may get memory that the first one had."""
    found = []
    for _ in range(2):
        with of_rank(rank, link, axis) as mlp:
            found.append(done(mlp, job, numbers))
    return found


def left_alone(rank: int, link: Any) -> str:
    """Rank 1 goes after the warm-up; rank 0 calls."""
    mlp = of_rank(rank, link)
    mlp.warm_up(64)
    if rank == 1:
        return "gone"
    host = Host(mlp)
    mlp(*host.pair(64), stream=host.stream)
    try:
        mlp.check()
    except PipelineTimeoutError as error:
        said = str(error)
    else:
        return "no timeout"
    try:
        mlp(*host.pair(64), stream=host.stream)
    except DeviceError:
        with contextlib.suppress(OSError, EOFError):
            mlp.close()
        return said
    return "no error"


def contexts(rank: int, link: Any) -> list[int]:
    """GPUs on which a rank has a context after a call."""
    from cuda.bindings import driver

    with of_rank(rank, link) as mlp:
        mlp.warm_up(64)
        devices = range(check(driver.cuDeviceGetCount()))
        return [d for d in devices if check(driver.cuDevicePrimaryCtxGetState(d))[1]]


def _child(rank: int, link: Any, results: Any, body: Any, args: Sequence[Any]) -> None:
    warnings.simplefilter("ignore")
    try:
        results.put((rank, body(rank, link, *args)))
    except BaseException:  # noqa: BLE001
        results.put((rank, traceback.format_exc()))


def in_two_processes(body: Callable[..., Any], *args: Any) -> list[Any]:
    """What `body` gives in each of two processes; a hang ends after WHOLE_S."""
    spawn = multiprocessing.get_context("spawn")
    results, links = spawn.Queue(), spawn.Pipe()
    children = [
        spawn.Process(target=_child, args=(rank, links[rank], results, body, args))
        for rank in range(2)
    ]
    found: dict[int, Any] = {}
    try:
        for child in children:
            child.start()
        for link in links:
            link.close()
        for _ in children:
            rank, value = results.get(timeout=WHOLE_S)
            found[rank] = value
    finally:
        for child in children:
            child.join(5)
            child.kill()
    return [found[rank] for rank in range(2)]
