"""What baselines are offered, and how they drive libraries and driver, on fakes that keep a log."""

from __future__ import annotations

import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ctatune import baselines, graphs, microbatch, space, timing
from ctatune.config import Baseline, parse_config
from ctatune.errors import DeviceError, UsageError
from ctatune.graphs import Graphed
from ctatune.microbatch import MicroBatch
from ctatune.problem import Problem
from ctatune.reduce import held_to


def problem(m: int, gpus: int = 2, **sizes: int) -> Problem:
    k, h, n = (sizes.get(name, 8192) for name in "khn")
    return Problem(m=m, k=k, h=h, n=n, gpus=gpus)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nccl": "ring/ll"}, "nccl belongs to tp"),
        ({"method": "tp", "nccl": "ring"}, "algorithm/protocol"),
        ({"method": "tp", "nccl": "nvls/simple"}, "algorithm/protocol"),
        ({"method": "rowsplit", "graph": True}, "graph belongs to"),
        ({"method": "tp", "graph": True}, "graph belongs to"),  # a second replay blocks the host
        ({"method": "microbatch"}, "chunk belongs to"),
        ({"method": "tp", "chunk": 64}, "chunk belongs to"),
    ],
)
def test_a_choice_of_another_method_is_refused(fields, words):
    with pytest.raises(UsageError, match=words):
        Baseline(**fields)


@pytest.mark.parametrize("m", [1, 16, 64, 256, 1024, 32768])
def test_every_baseline_is_distinct_and_comes_back_from_its_text(m):
    offered = space.baselines(problem(m))
    assert len({baseline.canonical() for baseline in offered}) == len(offered)
    assert len({str(baseline) for baseline in offered}) == len(offered)
    assert [parse_config(baseline.canonical()) for baseline in offered] == offered
    assert Baseline(method="tp").canonical() == '{"method":"tp"}'  # the key of shipped rows


def nccl_choices(m: int) -> set[str]:
    return {b.nccl for b in space.baselines(problem(m)) if b.method == "tp" and b.nccl}


def test_nccl_is_held_to_what_makes_sense_for_the_bytes():
    assert nccl_choices(1) == {"ring/ll", "ring/ll128"}
    assert nccl_choices(64) == {"ring/ll", "ring/ll128", "ring/simple"}
    assert nccl_choices(4096) == {"ring/ll128", "ring/simple"}


def test_graphs_are_offered_for_few_tokens():
    offered = {b.method for b in space.baselines(problem(256)) if b.graph}
    assert offered == {"single", "tp_twoshot"}
    assert not any(b.graph for b in space.baselines(problem(257)))


@pytest.mark.parametrize(
    ("m", "chunks"),
    [
        (64, []),
        (65, [64]),
        (256, [128, 64]),
        (1000, [512, 256, 128, 64]),
        (1536, [768, 384, 192, 128]),
    ],
)
def test_micro_batches_are_parts_of_the_tokens(m, chunks):
    assert [b.chunk for b in space.baselines(problem(m)) if b.method == "microbatch"] == chunks


def test_one_gpu_races_only_against_single():
    assert {b.method for b in space.baselines(problem(64, gpus=1))} == {"single"}
    assert space.answers(Baseline(), 1)
    assert not space.answers(Baseline(), 2)
    assert not space.answers(Baseline(method="rowsplit"), 2)


def test_nccl_reads_the_choice_from_the_environment_only_while_it_starts(monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "mine")
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    with held_to("ring/ll128"):
        assert (os.environ["NCCL_ALGO"], os.environ["NCCL_PROTO"]) == ("Ring", "LL128")
    assert os.environ["NCCL_ALGO"] == "mine"
    assert "NCCL_PROTO" not in os.environ
    with held_to(""):
        assert "NCCL_ALGO" not in os.environ
    assert os.environ["NCCL_ALGO"] == "mine"


class FakeGpus:
    """Streams and events that only keep what was asked of them, in order."""

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log, self.l2_bytes, self._events = log, 60 << 20, 0
        self.streams = [self._stream(f"main{gpu}") for gpu in range(2)]
        self.devices = [
            SimpleNamespace(create_stream=lambda g=gpu: self._stream(f"copy{g}"))
            for gpu in range(2)
        ]

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(
            handle=name,
            record=lambda event: self.log.append((name, "record", event)),
            wait=lambda event: self.log.append((name, "wait", event)),
        )

    def use(self, gpu: int) -> None:
        pass

    def sync(self) -> None:
        self.log.append(("sync",))

    def event(self, gpu: int) -> str:
        self._events += 1
        return f"event{gpu}.{self._events}"

    def copy(self, to: int, source: int, nbytes: int, stream: Any) -> None:
        self.log.append((stream.handle, "copy", to, source, nbytes))


class FakeDriver:
    """Captures and replays; `refuses` is what the end of a capture answers instead."""

    CUresult = graphs.driver.CUresult

    def __init__(self, log: list[tuple[Any, ...]], refuses: Any = None) -> None:
        self.log, self.refuses = log, refuses

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.log.append((name, *arguments))
            if name == "cuStreamEndCapture" and self.refuses:
                return (self.refuses, None)
            value = [f"{name}({arguments[0]})"]
            made = name in ("cuStreamEndCapture", "cuGraphInstantiate")
            return (self.CUresult.CUDA_SUCCESS, *(value if made else ()))

        return call


def method(log: list[tuple[Any, ...]]) -> Any:
    return SimpleNamespace(
        y2={0: 1, 1: 2},
        sets=2,
        kernel=None,
        check=lambda: log.append(("check",)),
        call=lambda which=0: log.append(("call", which)),
    )


def graphed(monkeypatch, log: list[tuple[Any, ...]], arena: Any, refuses: Any = None) -> Graphed:
    monkeypatch.setattr(graphs, "driver", FakeDriver(log, refuses))
    gpus: Any = FakeGpus(log)
    return Graphed(gpus, arena, method(log), "single graph")


def test_all_streams_capture_a_call_at_once_and_replay_their_part(monkeypatch):
    log: list[tuple[Any, ...]] = []
    closing: list[Any] = []
    ready = graphed(monkeypatch, log, SimpleNamespace(on_close=closing.append))
    names = [entry[0] for entry in log]
    begin, end = "cuStreamBeginCapture", "cuStreamEndCapture"
    assert names[:7] == ["call", "sync", begin, begin, "call", end, end]
    assert [entry[1] for entry in log if entry[0] == "call"] == [0, 0, 1]  # warm, then each set
    log.clear()
    ready.call(3)
    assert [entry[0] for entry in log] == ["cuGraphLaunch", "cuGraphLaunch"]
    assert [entry[2] for entry in log] == ["main0", "main1"]
    log.clear()
    closing[0]()
    assert [entry[0] for entry in log] == ["cuGraphExecDestroy"] * 4


def test_a_refused_capture_ends_on_every_stream_and_names_the_method(monkeypatch):
    log: list[tuple[Any, ...]] = []
    refused = graphs.driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    arena = SimpleNamespace(on_close=lambda _: None)
    with pytest.raises(DeviceError, match=r"single graph cannot be captured: .*INVALIDATED"):
        graphed(monkeypatch, log, arena, refused)
    assert [entry[0] for entry in log][-2:] == ["cuStreamEndCapture"] * 2


class FakeInputs:
    def __init__(self, gpus: Any, shape: Problem) -> None:
        self.gpus, self.problem, self._next = gpus, shape, 0

    def place(self, *_: Any) -> int:
        self._next += 1 << 32
        return self._next

    x = w_up = w_down = y2 = place


class FakeBlas:
    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log, self.tuned = log, set()

    def tune(self, gpu: int, x: int, w: int, y: int, sizes: Any) -> None:
        self.tuned.add((gpu, x, w, y, sizes))

    def gemm(self, gpu: int, x: int, w: int, y: int, sizes: Any) -> None:
        assert w
        self.log.append((f"main{gpu}", "gemm", x, y, sizes))


class FakeGemm:
    """What a micro-batch needs of `gemm.Gemm`."""

    def __init__(
        self, gpus: Any, _arena: Any, gpu: int, config: Any, sizes: Any, sets: Any
    ) -> None:
        self.sizes, self.sets = sizes, sets
        self.log, self.gpu, self.config = gpus.log, gpu, config

    def call(self, which: int) -> None:
        x, _, y = self.sets[which % len(self.sets)]
        self.log.append((f"main{self.gpu}", "gemm", x, y, self.sizes))

    def check(self) -> None:
        self.log.append(("check",))

    def build(self) -> str:
        return f"kernel of {self.config.up}"


def pipeline(log: list[tuple[Any, ...]], baseline: Baseline, shape: Problem) -> MicroBatch:
    gpus: Any = FakeGpus(log)
    inputs: Any = FakeInputs(gpus, shape)
    libraries: Any = SimpleNamespace(blas=FakeBlas(log))
    arena: Any = SimpleNamespace(alloc=inputs.place)
    return MicroBatch(baseline, libraries, arena, inputs)


@pytest.mark.parametrize("m", [65, 384, 1024, 16384])
def test_a_chain_never_fills_the_queue_of_a_stream(m):
    """It waits at the gate: the host would block before it opens it."""
    shape = problem(m)
    for baseline in space.baselines(shape):
        bound = baselines.launches(baseline, shape)
        assert bound * timing.MIN_CALLS <= timing.QUEUE
        if baseline.method != "microbatch":
            continue
        log: list[tuple[Any, ...]] = []
        ready = pipeline(log, baseline, shape)
        log.clear()
        ready.call()
        enqueued = Counter(entry[0] for entry in log)
        enqueued.update(entry[0] for entry in log if entry[1] == "gemm")  # in split-K: its sum
        assert max(enqueued.values()) + 1 <= bound  # and the barrier


def test_micro_batches_run_the_same_pipeline_with_cublas_and_with_our_kernel(monkeypatch):
    monkeypatch.setattr(microbatch, "Gemm", FakeGemm)
    shape = problem(160, k=72, h=136, n=264)
    logs: list[list[tuple[Any, ...]]] = []
    for name in ("microbatch", "microbatch_cta"):
        log: list[tuple[Any, ...]] = []
        ready = pipeline(log, Baseline(method=name, chunk=64), shape)
        log.clear()
        ready.call(1)
        logs.append(log)
    assert logs[0] == logs[1]
    assert "64x64" in str(ready.kernel)
    ready.check()
    assert log.count(("check",)) == 4  # a GPU has one Gemm a size of chunks
    products = [entry for entry in log if entry[1:2] == ("gemm",)]
    assert [entry[-1] for entry in products] == [
        *((64, 136, 72, 72, 128, 192), (64, 264, 136, 192, 192, 264)) * 2,
        *((32, 136, 72, 72, 128, 192), (32, 264, 136, 192, 192, 264)),
    ]
    copies = [entry for entry in log if entry[1:2] == ("copy",)]
    for product, copy in zip(products, copies, strict=True):
        assert copy[3] == product[3]  # what was computed is sent
    for up, down in zip(copies[::2], products[1::2], strict=True):
        assert up[2] == down[2]  # and `down` reads what was received


def test_every_product_of_a_micro_batch_is_tuned_before_a_call():
    log: list[tuple[Any, ...]] = []
    libraries: Any = SimpleNamespace(blas=FakeBlas(log))
    gpus: Any = FakeGpus(log)
    inputs: Any = FakeInputs(gpus, problem(160, k=64, h=128, n=256))
    arena: Any = SimpleNamespace(alloc=inputs.place)
    ready = MicroBatch(Baseline(method="microbatch", chunk=64), libraries, arena, inputs)
    ready.call(0)
    asked = {(entry[2], entry[3], entry[4]) for entry in log if entry[1:2] == ("gemm",)}
    assert asked == {(x, y, sizes) for _, x, _, y, sizes in libraries.blas.tuned}


def test_what_a_baseline_cannot_run_is_said():
    missing = baselines.why_missing()
    if missing:
        pytest.skip(missing)
    three = problem(512, gpus=3)
    assert "needs 2 GPUs" in (
        baselines.why_not(Baseline(method="microbatch", chunk=64), three) or ""
    )
    large = baselines.why_not(Baseline(method="microbatch_cta", chunk=512), problem(512))
    assert "fewer rows" in (large or "")


def test_chunks_that_would_fill_the_queue_of_a_stream_are_refused(monkeypatch):
    monkeypatch.setattr(baselines, "why_missing", lambda: None)
    few, many = (Baseline(method="microbatch", chunk=rows) for rows in (64, 4))
    assert baselines.why_not(few, problem(1024)) is None
    reason = baselines.why_not(many, problem(1024))
    assert reason == "chunks must not fill the queue of a stream, 4 rows are too few"
