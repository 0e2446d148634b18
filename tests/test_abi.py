"""Host and kernel agree: the structs of kernels/mlp.cu as text against their mirrors in Python."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ctatune import abi, gpus
from ctatune.abi import ERROR, PARAMS, RECEIVER_UNIT, SEGMENT_UNIT, STAMPS, Flags
from ctatune.errors import PipelineTimeoutError
from ctatune.gpus import LINE_BYTES, Arena, Gpus
from ctatune.jit import source
from ctatune.limits import TILE_K
from ctatune.problem import MAX_GPUS
from ctatune.schedule import DOWN, NOTHING, PARTIAL, UP

KINDS = {"TensorMap": "V128", "long long": "i8", "int": "i4", "uint32_t": "u4"}
COUNTS = {
    "": 1,
    "2": 2,
    "kMaxGpus": MAX_GPUS,
    "kMaxGpus + 1": MAX_GPUS + 1,
    "2 * kMaxGpus": 2 * MAX_GPUS,
}
Fields = list[tuple[str, np.dtype[Any], int]]


def code() -> str:
    return re.sub(r"//[^\n]*", "", source("mlp"))


def fields_of(struct: str) -> Fields:
    """Name, type and count of each field of a struct in kernels/mlp.cu."""
    found = re.search(rf"struct {struct} \{{(.*?)\}};", code(), re.DOTALL)
    assert found, f"no struct {struct}"
    fields: Fields = []
    for statement in filter(None, map(str.strip, found[1].split(";"))):
        pointer = "*" in re.sub(r"\[.*?\]", "", statement)  # not in a size
        words = re.fullmatch(r"(long long|\w+)(?: const)?([\s*].*)", statement, re.DOTALL)
        assert words, statement
        kind = np.dtype("u8" if pointer else KINDS[words[1]])
        for declared in words[2].split(","):
            name = re.fullmatch(r"[\s*]*(\w+)(?:\[(.*)\])?", declared)
            assert name, statement
            fields.append((name[1], kind, COUNTS[name[2] or ""]))
    return fields


def fields_of_dtype(dtype: np.dtype[Any]) -> Fields:
    assert dtype.names
    return [
        (name, dtype[name].base, int(np.prod(dtype[name].shape, dtype=int)))
        for name in dtype.names
        if name != "padding"
    ]


def constant(name: str) -> int:
    found = re.search(rf"\b{name} = (\d+)\b", code())
    assert found, f"no constant {name}"
    return int(found[1])


def test_params_are_the_struct_of_the_kernel():
    assert fields_of_dtype(PARAMS) == fields_of("Params")
    assert PARAMS.itemsize % 128 == 0  # it is aligned to its tensor maps
    assert PARAMS["padding"].itemsize < 128


def test_the_error_record_is_the_struct_of_the_kernel():
    assert fields_of_dtype(ERROR) == fields_of("PollError")


def test_stamps_have_the_order_of_the_kernel():
    found = re.search(r"enum Stamp \{(.*?)\}", code(), re.DOTALL)
    assert found
    names = re.findall(r"k(\w+)", found[1])
    assert [re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower() for name in names] == [*STAMPS, "stamps"]


def test_constants_of_the_kernel():
    assert constant("kMaxGpus") == MAX_GPUS
    assert constant("kTileK") == TILE_K
    assert constant("kLine") * 4 == LINE_BYTES
    assert constant("kSegmentUnit") == SEGMENT_UNIT
    assert constant("kReceiverUnit") == RECEIVER_UNIT
    layers = ("kUpTile", "kDownTile", "kPartialTile", "kNoTile")
    assert tuple(map(constant, layers)) == (UP, DOWN, PARTIAL, NOTHING)


def test_slots_are_packed_with_the_segment_above_the_layer():
    slots = np.array([(DOWN, 128, 64, 320, 3, 1), (NOTHING, 0, 0, 0, 0, 0)], np.int32)
    assert abi.packed(slots).tolist() == [[3 * 256 + DOWN, 128, 64, 320], [NOTHING, 0, 0, 0]]
    slots[0, 0] = PARTIAL
    first = abi.packed(slots, np.array([5, 0], np.int32))[0]
    assert first.tolist() == [5 * 65536 + 3 * 256 + PARTIAL, 128, 64, 320]


def test_flags_stand_on_lines_of_their_own():
    flags, size = Flags.at(1 << 20, 3), Flags.nbytes(3)
    lines = [(flags.panels, 6), (flags.started, MAX_GPUS), (flags.arrived, 1), (flags.calls, 2)]
    ends = [pointer + count * LINE_BYTES for pointer, count in lines]
    assert ends == [flags.started, flags.arrived, flags.calls, (1 << 20) + size]


def test_an_error_record_says_what_was_awaited():
    record = np.array((1, 5, 8, 7), ERROR)
    found: Any = SimpleNamespace(download=lambda *_: record)
    with pytest.raises(
        PipelineTimeoutError, match=r"GPU 1 waited .* for panel 5 of Y1: target 8, value 7"
    ):
        abi.raise_poll_error(found, 1, 0)
    record["code"] = 0
    abi.raise_poll_error(found, 1, 0)
    record["code"] = 3
    with pytest.raises(PipelineTimeoutError, match="GPU 5 waited"):
        abi.raise_poll_error(found, 0, 0, 5)


class FakeDriver:
    """Logs what is called, and says that all went well."""

    CUresult = gpus.driver.CUresult

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            self._log.append((name, *args))
            return (self.CUresult.CUDA_SUCCESS, 4096)[: 2 if name == "cuMemAlloc" else 1]

        return call


def test_memory_is_filled_and_written_on_the_stream_of_its_gpu(monkeypatch):
    """Not on the default stream, for which ours do not wait; complete before a peer may add."""
    log: list[tuple[Any, ...]] = []
    monkeypatch.setattr(gpus, "driver", FakeDriver(log))
    machine: Any = Gpus.__new__(Gpus)
    machine.streams = [SimpleNamespace(handle=f"stream {gpu}") for gpu in range(2)]
    machine.devices = [SimpleNamespace(set_current=lambda: None)] * 2
    arena = Arena(machine)
    assert arena.zeros(1, 256) == 4096
    assert log[1:] == [
        ("cuMemsetD8Async", 4096, 0, 256, "stream 1"),
        ("cuStreamSynchronize", "stream 1"),
    ]
    log.clear()
    arena.upload(1, np.zeros(4, np.int32))
    assert [(entry[0], entry[-1]) for entry in log[1:]] == [
        ("cuMemcpyHtoDAsync", "stream 1"),
        ("cuStreamSynchronize", "stream 1"),
    ]
