"""The search space: each rule of `why_invalid` has a case, and what it offers is valid."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctatune.config import Config, Tile
from ctatune.problem import Problem
from ctatune.space import (
    SHAPES,
    SMEM_BYTES,
    candidates,
    default_config,
    default_split,
    smem_bytes,
    why_invalid,
)

PROBLEM = Problem(m=1024, k=8192, h=8192, n=8192, gpus=2)
BIG = Tile(m=128, n=256)
GOOD = Config(up=BIG, down=BIG, stages=3, d_slabs=4)
sizes = st.integers(1, 4096).map(lambda n: 8 * n)
problems = st.builds(
    Problem,
    m=st.integers(1, 20_000),
    k=sizes,
    h=sizes,
    n=sizes,
    gpus=st.integers(1, 8),
)


def test_the_good_config_is_valid() -> None:
    assert why_invalid(GOOD, PROBLEM) is None
    assert why_invalid(replace(GOOD, pace_us=8.0), PROBLEM) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 8196}, ("k must be", "multiple of 8", "8196")),
        ({"h": 8190}, ("h must be", "multiple of 8", "8190")),
        ({"n": 4}, ("n must be", "multiple of 8", "4")),
        ({"m": 1 << 20, "h": 65536}, ("do not fit", "141 GB")),
        ({"gpus": 3}, ("stage split 1:1", "3 GPUs")),
    ],
)
def test_rules_of_the_problem(change: dict[str, Any], words: tuple[str, ...]) -> None:
    reason = why_invalid(GOOD, replace(PROBLEM, **change))
    assert reason is not None
    assert all(word in reason for word in words), reason


@pytest.mark.parametrize("layer", ["up", "down"])
@pytest.mark.parametrize(
    ("tile", "slabs", "words"),
    [
        (Tile(m=48, n=256), 4, ("tile m must be", "48")),
        (Tile(m=192, n=64), 4, ("tile m must be", "192")),
        (Tile(m=128, n=96), 4, ("tile n must be", "96")),
        (Tile(m=128, n=320), 4, ("tile n must be", "320")),
        (Tile(m=64, n=64), 4, ("tile n must be", "64")),
        (Tile(m=64, n=192), 4, ("tile n must be", "192")),
        (Tile(m=256, n=256), 4, ("accumulators", "256x256")),
        (Tile(m=64, n=256), 2, ("d_slabs must be at least 3", "64x256")),
        (Tile(m=64, n=128), 1, ("d_slabs must be at least 2", "64x128")),
    ],
)
def test_rules_of_a_tile(layer: str, tile: Tile, slabs: int, words: tuple[str, ...]) -> None:
    reason = why_invalid(replace(GOOD, d_slabs=slabs, **{layer: tile}), PROBLEM)
    assert reason is not None
    assert all(word in reason for word in words), reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 1}, ("stages must be at least 2", "1")),
        ({"d_slabs": 0}, ("d_slabs must be at least 1", "0")),
        ({"stages": 4}, ("shared memory", str(SMEM_BYTES), str(smem_bytes(GOOD) + 49152 + 16))),
        ({"pace_us": 8.0, "d_slabs": 3}, ("pace_us needs room for a whole tile", "3")),
        ({"pace_us": 8.0, "d_slabs": 2, "up": Tile(m=128, n=128)}, ("pace_us needs", "2")),
        ({"pace_us": 8.0, "d_slabs": 2, "down": Tile(m=128, n=128)}, ("pace_us needs", "2")),
        ({"stage_split": (2, 0)}, ("mix 1", "(1, 1)")),
        ({"stage_split": (2, 0), "mix": 0.5}, ("a GPU in each stage",)),
        ({"stage_split": (0, 2), "mix": 0.0}, ("a GPU in each stage",)),
        ({"stage_split": (2, 1)}, ("2:1", "2 GPUs")),
        ({"down_axis": "h"}, ("down_axis h",)),
        ({"ctas": 133}, ("ctas", "132", "133")),
    ],
)
def test_rules_of_a_config(change: dict[str, Any], words: tuple[str, ...]) -> None:
    reason = why_invalid(replace(GOOD, **change), PROBLEM)
    assert reason is not None
    assert all(word in reason for word in words), reason


def test_the_device_says_how_many_sms_there_are() -> None:
    """132 written into a kernel is a deadlock on a GPU with 78 SMs (FlashMoE 3)."""
    config = replace(GOOD, ctas=132)
    assert why_invalid(config, PROBLEM, sm_count=132) is None
    assert why_invalid(config, PROBLEM, sm_count=78) is not None


@pytest.mark.parametrize(
    ("shape", "wanted_bytes"),
    [
        # ring + slabs + 16 bytes of barriers for each stage and slab
        ((128, 256, 3, 4), 147_456 + 65_536 + 7 * 16),
        ((128, 256, 4, 2), 196_608 + 32_768 + 6 * 16),
        ((256, 128, 3, 2), 147_456 + 65_536 + 5 * 16),
        ((128, 128, 6, 2), 196_608 + 32_768 + 8 * 16),
        ((64, 128, 8, 2), 196_608 + 16_384 + 10 * 16),
    ],
)
def test_shared_memory(shape: tuple[int, int, int, int], wanted_bytes: int) -> None:
    m, n, stages, slabs = shape
    tile = Tile(m=m, n=n)
    config = Config(up=tile, down=tile, stages=stages, d_slabs=slabs)
    assert smem_bytes(config) == wanted_bytes <= SMEM_BYTES


def test_shared_memory_holds_the_larger_of_two_tiles() -> None:
    mixed = replace(GOOD, up=Tile(m=256, n=64), down=Tile(m=128, n=256))
    wide = Tile(m=256, n=256)
    assert smem_bytes(mixed) == smem_bytes(replace(GOOD, up=wide, down=wide))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_starting_shape_is_valid_and_fills_shared_memory(
    shape: tuple[int, int, int, int],
) -> None:
    m, n, stages, slabs = shape
    tile = Tile(m=m, n=n)
    config = Config(up=tile, down=tile, stages=stages, d_slabs=slabs)
    assert why_invalid(config, PROBLEM) is None
    deeper = replace(config, stages=stages + 1)
    reason = why_invalid(deeper, PROBLEM)
    assert reason is not None
    assert "shared memory" in reason


@settings(deadline=None)
@given(problems)
def test_default_config_is_valid(problem: Problem) -> None:
    assert why_invalid(default_config(problem), problem) is None


@settings(max_examples=12, deadline=None)
@given(problems)
def test_candidates_are_valid_and_distinct(problem: Problem) -> None:
    configs = list(candidates(problem))
    assert all(why_invalid(config, problem) is None for config in configs)
    assert len({config.canonical() for config in configs}) == len(configs)
    assert any(config.mix == 1.0 for config in configs)
    assert problem.gpus == 1 or {config.mix for config in configs} >= {0.0, 0.5, 1.0}
    paces_us = {config.pace_us for config in configs}
    assert paces_us == {0.0} if problem.gpus == 1 else len(paces_us) > 1


@pytest.mark.parametrize("gpus", range(1, 9))
def test_the_default_is_a_candidate(gpus: int) -> None:
    problem = replace(PROBLEM, gpus=gpus)
    assert default_config(problem) in set(candidates(problem))


def test_candidates_come_in_a_fixed_order() -> None:
    assert list(candidates(PROBLEM)) == list(candidates(PROBLEM))


@pytest.mark.parametrize("gpus", range(1, 9))
def test_default_split_adds_up(gpus: int) -> None:
    assert sum(default_split(gpus)) == gpus
