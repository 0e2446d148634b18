"""The search space: each rule of `why_invalid` has a case, and what it offers is valid."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctatune.config import Baseline, Config, Tile
from ctatune.errors import UsageError
from ctatune.limits import (
    SMEM_BYTES,
    default_split,
    down_stages,
    math_groups,
    smem_bytes,
    why_invalid,
)
from ctatune.problem import Problem
from ctatune.space import FAMILIES, Family, candidates, default_config, defaults, fitted, swapped

PROBLEM = Problem(m=1024, k=8192, h=8192, n=8192, gpus=2)
BIG = Tile(m=128, n=256)
SPLIT = Tile(m=128, n=128, split_k=2)
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
        (Tile(m=128, n=80), 4, ("tile n must be", "80")),
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
        ({"up": Tile(m=128, n=256, split_k=3)}, ("split_k must be 1, 2 or 4", "3 and 1")),
        (
            {"up": Tile(m=128, n=128, split_k=2), "down": Tile(m=128, n=128, split_k=4)},
            ("the same in both layers", "2 and 4"),
        ),
        ({"up": Tile(m=256, n=128, split_k=2)}, ("split_k needs a tile m of at most 128",)),
        (
            {"up": SPLIT, "down": SPLIT, "multicast": True, "d_slabs": 2},
            ("multicast needs a layer with split_k 1",),
        ),
        ({"up": Tile(m=64, n=128, split_k=4), "multicast": True}, ("at most 2 in the other",)),
        (
            {"up": Tile(m=64, n=128, split_k=2), "down": SPLIT},
            ("both tile m of at least 128, or both of less",),
        ),
        ({"multicast": True}, ("even number of tile rows and an even group", "8 in groups of 1")),
        ({"direct": True}, ("direct stores", "2 d_slabs")),
        ({"direct": True, "d_slabs": 2, "pace_us": 8.0}, ("direct stores go at no pace",)),
        (
            {"ctas": 131, "down": Tile(m=128, n=256, split_k=2), "stages": 2, "d_slabs": 2},
            ("multiple of the cluster (2)", "131"),
        ),
        (
            {"up": Tile(m=64, n=64), "down": Tile(m=256, n=128), "stages": 5, "d_slabs": 1},
            ("tile n must be a multiple of 128", "64"),
        ),
        (
            {"up": Tile(m=64, n=128), "down": Tile(m=256, n=128), "d_slabs": 2},
            ("stages must be at least 2", "3 of up, 1 of down"),
        ),
        ({"stages": 4}, ("shared memory", str(SMEM_BYTES), str(smem_bytes(GOOD) + 49152 + 16))),
        ({"pace_us": 8.0, "d_slabs": 3}, ("pace_us needs room for a whole tile", "3")),
        ({"pace_us": 8.0, "d_slabs": 2, "up": Tile(m=128, n=128)}, ("pace_us needs", "2")),
        ({"pace_us": 8.0, "d_slabs": 2, "down": Tile(m=128, n=128)}, ("pace_us needs", "2")),
        ({"stage_split": (2, 0)}, ("mix 1", "(1, 1)")),
        ({"stage_split": (2, 0), "mix": 0.5}, ("a GPU in each stage",)),
        ({"stage_split": (0, 2), "mix": 0.0}, ("a GPU in each stage",)),
        ({"stage_split": (2, 1)}, ("2:1", "2 GPUs")),
        ({"down_axis": "h", "mix": 0.5}, ("down_axis h needs mix 1",)),
        ({"down_axis": "h", "up": Tile(m=64, n=256)}, ("the same tile m",)),
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
        # ring + slabs + barriers: 16 bytes a stage and slab, and 40 for sums, receivers, pairs
        ((128, 256, 3, 4), 147_456 + 65_536 + (3 + 4) * 16 + 40),
        ((128, 256, 4, 2), 196_608 + 32_768 + (4 + 2) * 16 + 40),
        ((256, 128, 3, 2), 147_456 + 65_536 + (3 + 2) * 16 + 40),
        ((128, 128, 6, 2), 196_608 + 32_768 + (6 + 2) * 16 + 40),
        ((64, 128, 8, 2), 196_608 + 16_384 + (8 + 2) * 16 + 40),
    ],
)
def test_shared_memory(shape: tuple[int, int, int, int], wanted_bytes: int) -> None:
    m, n, stages, slabs = shape
    tile = Tile(m=m, n=n)
    config = Config(up=tile, down=tile, stages=stages, d_slabs=slabs)
    assert smem_bytes(config) == wanted_bytes <= SMEM_BYTES


@pytest.mark.parametrize(
    ("up", "down", "stages", "down_stages_wanted"),
    [((128, 256), (64, 128), 3, 6), ((64, 128), (128, 256), 8, 4), ((64, 128), (128, 192), 5, 3)],
)
def test_down_divides_the_ring_of_up_anew(
    up: tuple[int, int], down: tuple[int, int], stages: int, down_stages_wanted: int
) -> None:
    """Unequal tiles: one memory, two sets of barriers as deep as the deeper ring, larger slabs."""
    tiles = [Tile(m=m, n=n) for m, n in (up, down)]
    config = Config(up=tiles[0], down=tiles[1], stages=stages, d_slabs=2)
    assert down_stages(config) == down_stages_wanted
    ring = stages * (up[0] + up[1]) * 128
    slabs = 2 * max(up[0], down[0]) * 128
    depth = max(stages, down_stages_wanted)
    assert smem_bytes(config) == ring + slabs + (2 * depth + 2) * 16 + 40


def test_the_order_of_tiles_and_the_split_leave_one_ring() -> None:
    ordered = replace(GOOD, up=replace(BIG, group_m=8))
    assert smem_bytes(ordered) == smem_bytes(GOOD)


def test_a_layer_whose_tiles_go_in_pairs_has_its_own_ring() -> None:
    tile = Tile(m=64, n=128, group_m=2)
    both = Config(up=tile, down=tile, stages=5, d_slabs=2)
    one = replace(both, up=replace(tile, split_k=2), multicast=True)
    sums = 32 * 128 * 4
    assert smem_bytes(one) == smem_bytes(both) + sums + 2 * 8 * 5


def test_split_tiles_have_room_for_the_sums_of_the_others_and_smaller_slabs() -> None:
    tile = Tile(m=128, n=128, split_k=4)
    config = Config(up=tile, down=tile, stages=4, d_slabs=2)
    ring, slabs, sums = 4 * 32_768, 2 * 32 * 128, 3 * 32 * 128 * 4
    assert smem_bytes(config) == ring + slabs + sums + (4 + 2) * 16 + 40
    direct = replace(config, direct=True)  # no slabs: results go from registers
    assert smem_bytes(direct) == smem_bytes(config) - slabs


def test_one_small_tile_needs_one_math_group() -> None:
    tile = Tile(m=64, n=64, split_k=2)
    config = Config(up=tile, down=tile, stages=13, d_slabs=2, direct=True)
    assert math_groups(config) == 1
    assert why_invalid(config, PROBLEM) is None
    assert math_groups(replace(config, down=Tile(m=64, n=128, split_k=2))) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_valid_and_fills_shared_memory(family: Family) -> None:
    config = family.config(up_group=2, down_group=2)
    problem = replace(PROBLEM, m=4 * family.m)
    assert why_invalid(config, problem) is None
    deeper = replace(config, stages=config.stages + 1)
    reason = why_invalid(deeper, problem)
    assert reason is not None
    assert "shared memory" in reason


@settings(deadline=None)
@given(problems)
def test_default_config_is_valid(problem: Problem) -> None:
    assert why_invalid(default_config(problem), problem) is None


@settings(max_examples=5, deadline=None)
@given(problems)
def test_candidates_are_valid_and_distinct(problem: Problem) -> None:
    configs = list(candidates(problem))
    assert all(why_invalid(config, problem) is None for config in configs)
    assert len({config.canonical() for config in configs}) == len(configs)
    assert any(config.mix == 1.0 for config in configs)
    assert problem.gpus == 1 or {config.mix for config in configs} >= {0.0, 0.5, 1.0}
    paces_us = {config.pace_us for config in configs if not config.direct}
    assert paces_us <= {0.0} if problem.gpus == 1 else len(paces_us) != 1


@pytest.mark.parametrize("gpus", range(1, 9))
def test_what_is_always_tried_is_in_the_space(gpus: int) -> None:
    for problem in (replace(PROBLEM, gpus=gpus), replace(PROBLEM, m=300, gpus=gpus)):
        assert set(defaults(problem)) <= set(candidates(problem))


def test_candidates_come_in_a_fixed_order() -> None:
    assert list(candidates(PROBLEM)) == list(candidates(PROBLEM))


@pytest.mark.parametrize("gpus", [0, 9, True, 2.0, "2", None])
def test_a_number_of_gpus_is_a_whole_one(gpus: Any) -> None:
    with pytest.raises(UsageError, match="gpus must be between 1 and 8"):
        replace(PROBLEM, gpus=gpus)


@pytest.mark.parametrize("gpus", range(1, 9))
def test_default_split_adds_up(gpus: int) -> None:
    assert sum(default_split(gpus)) == gpus


@pytest.mark.parametrize(
    "changes",
    [
        *({"multicast": 1}, {"direct": "false"}, {"stages": 4.0}, {"ctas": True}, {"mix": "0.5"}),
        *({"stage_split": (2.0, 2.0)}, {"stage_split": "11"}, {"stage_split": (True, 1)}),
        *({"stage_split": ()}, {"pace_us": True}, {"pace_us": None}),
    ],
)
def test_a_value_of_another_type_is_refused(changes):
    config = default_config(PROBLEM)
    (name,) = changes
    with pytest.raises(UsageError, match=name):
        replace(config, **changes)


def test_equal_configs_have_equal_keys():
    config = default_config(PROBLEM)
    zero = replace(config, mix=-0.0, pace_us=-0.0)
    assert zero.canonical() == replace(config, mix=0, pace_us=0.0).canonical()
    for fields in ({"m": True, "n": 64}, {"m": 64.0, "n": 64}):
        with pytest.raises(UsageError, match="tile m"):
            Tile(**fields)  # type: ignore[arg-type]
    wrong = ({"method": "single", "graph": 1}, {"method": "microbatch", "chunk": 64.0})
    for fields in (*wrong, {"method": "single", "chunk": False}):
        with pytest.raises(UsageError, match="must be"):
            Baseline(**fields)


@pytest.mark.parametrize("m", [65, 136, 200, 256, 300, 512])
def test_swapped_tiles_fit_the_tokens(m):
    problem = Problem(m=m, k=8192, h=4096, n=8192, gpus=1)
    found = [replace(config, stage_split=(1, 0)) for config in swapped(problem)]
    assert found
    assert len(set(found)) == len(found)
    for config in found:
        assert why_invalid(config, problem) is None
        for tile in config.tiles:
            rows = -(-m // tile.m)
            assert rows <= tile.group_m
            assert rows * tile.m - m < 8 * tile.split_k * rows
            assert not config.pairs(tile) or rows % 2 == 0


def test_swapped_tiles_for_other_tokens_have_as_many_rows_and_are_no_higher_than_these_need():
    tile = Tile(m=128, n=64, group_m=2)
    config = Config(up=tile, down=tile, stages=8, d_slabs=1, multicast=True, swap_ab=True)
    heights = {129: 80, 200: 112, 224: 112, 225: 128, 256: 128, 300: 160, 512: 256}
    for m, height in heights.items():
        other = fitted(config, 256, m)
        assert {tile.m for tile in other.tiles} == {height}
        assert why_invalid(other, replace(PROBLEM, m=m)) is None
        assert smem_bytes(other) <= SMEM_BYTES < smem_bytes(replace(other, stages=other.stages + 1))
    assert fitted(config, 256, 256) == config
    assert not fitted(
        replace(config, up=replace(tile, m=64), down=replace(tile, m=64)), 256, 130
    ).multicast
    high = Tile(m=160, n=128, split_k=2)
    short = Config(up=replace(high, split_k=1), down=high, stages=4, d_slabs=2, swap_ab=True)
    assert fitted(short, 156, 240) == short  # tiles of 240 rows leave room for two stages
    assert why_invalid(fitted(config, 256, 600), replace(PROBLEM, m=600)) is not None
    assert fitted(default_config(PROBLEM), 1024, 200) == default_config(PROBLEM)


def test_other_tokens_have_no_swapped_tiles():
    for m in (1, 64, 513):
        assert not list(swapped(Problem(m=m, k=8192, h=4096, n=8192, gpus=1)))


def test_each_part_of_a_swapped_tile_has_whole_groups_of_8_rows():
    tile = Tile(m=104, n=128, split_k=2)
    config = Config(up=tile, down=tile, stages=4, d_slabs=2, stage_split=(1, 0), swap_ab=True)
    problem = Problem(m=200, k=8192, h=4096, n=8192, gpus=1)
    reason = why_invalid(config, problem)
    assert reason is not None
    assert "a multiple of 16 with split_k 2 and swap_ab" in reason
    three = replace(config, up=replace(tile, split_k=3))
    assert "split_k must be 1, 2 or 4" in str(why_invalid(three, problem))
    high = replace(tile, m=112)
    assert why_invalid(replace(config, up=high, down=high), problem) is None
