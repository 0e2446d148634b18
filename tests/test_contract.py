"""What every runner of schedules must do: the NumPy executor, the kernel on one and two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from conftest import available

from ctatune import reference
from ctatune.config import Config, Tile
from ctatune.errors import CtatuneError
from ctatune.limits import default_split, why_invalid
from ctatune.problem import Output, Problem
from ctatune.records import RELATIVE_LIMIT, WORST_LIMIT
from ctatune.reference import Matrix
from ctatune.schedule import alone, build
from ctatune.space import FAMILIES, Family

Proves = Callable[..., bool]


@cache
def numpy_case(m: int, k: int, h: int, n: int) -> tuple[tuple[Matrix, Matrix, Matrix], Matrix]:
    """Inputs of a size, and the Y2 that they give."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k), dtype=np.float32)
    w_up = rng.standard_normal((h, k), dtype=np.float32) * np.float32(k**-0.5)
    w_down = rng.standard_normal((n, h), dtype=np.float32) * np.float32(h**-0.5)
    return (x, w_up, w_down), reference.expected(x, w_up, w_down)


def numpy_proves(problem: Problem, config: Config, *, skip_wait: bool = False) -> bool:
    """Whether the NumPy executor gives the right Y2 where it is promised, and nothing elsewhere."""
    inputs, expected = numpy_case(problem.m, problem.k, problem.h, problem.n)
    schedule = build(problem, config)
    outputs = reference.execute(schedule, *inputs, ctas=8, skip_wait=skip_wait)
    for gpu, output in enumerate(outputs):
        promised = np.zeros(problem.n, dtype=bool)
        for sender, receivers in enumerate(schedule.y2_gpus):
            if gpu in receivers:
                own = schedule.columns[1][sender]
                promised[own.start : own.stop] = True
        if not np.isnan(output[:, ~promised]).all():
            return False
        got, want = output[:, promised], expected[:, promised]
        if not got.size:
            continue
        difference = got - want
        if not np.linalg.norm(difference) <= RELATIVE_LIMIT * np.linalg.norm(want):
            return False
        if not np.abs(difference).max() <= WORST_LIMIT * want.std():
            return False
    return True


@pytest.fixture(params=["numpy", pytest.param("kernel", marks=pytest.mark.gpu)])
def proves(request: pytest.FixtureRequest) -> Proves:
    """Runs a config on a problem and says whether the result is right."""
    if request.param == "numpy":
        return numpy_proves
    bench = request.getfixturevalue("bench")
    return bench.proves


def config_of(gpus: int, family: Family, mix: float = 1.0) -> Config:
    group = 2 if family.multicast else 1
    return family.config(up_group=2, down_group=group, mix=mix, stage_split=default_split(gpus))


RAGGED = [(256, 512, 512, 512), (200, 328, 1000, 712), (8, 64, 264, 8), (1, 128, 512, 256)]


def gpus_or_skip(gpus: int, proves: Proves) -> None:
    """The executor runs any number of GPUs; the kernel needs real ones."""
    if proves is not numpy_proves and gpus > available():
        pytest.skip(f"needs {gpus} GPUs, this machine has {available()}")


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: "-".join(map(str, f)))
@pytest.mark.parametrize("sizes", RAGGED, ids=lambda s: "x".join(map(str, s)))
def test_every_family_at_ragged_sizes(proves, gpus, family, sizes):
    gpus_or_skip(gpus, proves)
    m, k, h, n = sizes
    problem = Problem(m=m, k=k, h=h, n=n, gpus=gpus)
    config = config_of(gpus, family)
    if why_invalid(config, problem):
        assert config.multicast
        config = replace(config, multicast=False)  # these rows do not come in pairs
    assert proves(problem, config)


@pytest.mark.parametrize("gpus", [2, 3, 4])
@pytest.mark.parametrize("output", ["replicated", "sharded", "last"])
@pytest.mark.parametrize("mix", [1.0, 0.5, 0.25, 0.0])
def test_every_output_and_mix(proves, output: Output, mix: float, gpus: int):
    gpus_or_skip(gpus, proves)
    problem = Problem(m=384, k=128, h=768, n=520, gpus=gpus, output=output)
    assert proves(problem, config_of(gpus, Family(128, 128, 2), mix))


@pytest.mark.parametrize("tiles", [(128, 64), (64, 128), (256, 128), (128, 256)], ids=str)
def test_layers_with_different_tiles(proves, tiles):
    gpus_or_skip(2, proves)
    problem = Problem(m=520, k=192, h=640, n=384, gpus=2)
    up, down = (Tile(m=m, n=128) for m in tiles)
    config = replace(config_of(2, Family(128, 128, 2)), stages=3, up=up, down=down)
    assert why_invalid(config, problem) is None
    assert proves(problem, config)


def prove_sum(proves: Proves, problem: Problem, config: Config) -> None:
    """Of a config along h; without multicast where these rows do not come in pairs."""
    if why_invalid(config, problem):
        config = replace(config, multicast=False)
    config = replace(config, down_axis="h")
    if reason := why_invalid(config, problem):
        assert "a tile of up on each GPU" in reason or "whole K blocks" in reason
        pytest.skip(reason)
    assert proves(problem, config)


@pytest.mark.parametrize("gpus", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: "-".join(map(str, f)))
@pytest.mark.parametrize("sizes", RAGGED, ids=lambda s: "x".join(map(str, s)))
def test_every_family_sums_over_gpus(proves, gpus, family, sizes):
    gpus_or_skip(gpus, proves)
    m, k, h, n = sizes
    problem = Problem(m=m, k=k, h=h, n=n, gpus=gpus)
    prove_sum(proves, problem, config_of(gpus, family))


@pytest.mark.parametrize("gpus", [2, 3, 4])
@pytest.mark.parametrize("output", ["replicated", "sharded", "last"])
@pytest.mark.parametrize("family", [Family(128, 128, 2), Family(64, 64, 2, split_k=2, direct=True)])
def test_sums_over_gpus_lie_where_they_are_promised(proves, family, output: Output, gpus: int):
    gpus_or_skip(gpus, proves)
    problem = Problem(m=384, k=128, h=1000, n=520, gpus=gpus, output=output)
    assert proves(problem, replace(config_of(gpus, family), down_axis="h"))


@pytest.mark.parametrize("gpus", [2, 3, 4])
def test_sums_over_gpus_are_those_of_one_gpu_bit_for_bit(gpus):
    problem = Problem(m=200, k=128, h=1000, n=712, gpus=gpus)
    config = replace(config_of(gpus, Family(64, 64, 2, split_k=2)), down_axis="h")
    inputs, _ = numpy_case(problem.m, problem.k, problem.h, problem.n)
    schedule = build(problem, config)
    (single,) = reference.execute(alone(schedule), *inputs)
    for output in reference.execute(schedule, *inputs):
        assert np.array_equal(output, single)


SMALL = Tile(m=64, n=64, split_k=2)
FEATURES = {  # (up, down, stages, slabs, more): what a tile can do besides its size
    "16 rows": (Tile(m=16, n=64), Tile(m=16, n=64), 13, 2, {"direct": True}),
    "32 rows, slabs": (Tile(m=32, n=128), Tile(m=32, n=128), 8, 2, {}),
    "split 2, direct": (SMALL, SMALL, 13, 2, {"direct": True}),
    "split 2, slabs": (Tile(m=128, n=128, split_k=2), Tile(m=128, n=128, split_k=2), 4, 2, {}),
    "split 4, slabs": (Tile(m=64, n=128, split_k=4), Tile(m=64, n=128, split_k=4), 6, 2, {}),
    "split 4, 16 rows": (
        Tile(m=16, n=64, split_k=4),
        Tile(m=16, n=64, split_k=4),
        12,
        2,
        {"direct": True},
    ),
    "split of down": (Tile(m=64, n=128), Tile(m=64, n=128, split_k=2), 6, 2, {}),
    "split of up": (Tile(m=64, n=128, split_k=2), Tile(m=64, n=256), 7, 2, {"direct": True}),
    "direct": (Tile(m=128, n=256), Tile(m=128, n=256), 4, 2, {"direct": True}),
    "multicast": (
        Tile(m=128, n=256, group_m=2),
        Tile(m=128, n=256, group_m=4),
        4,
        2,
        {"multicast": True},
    ),
    "multicast, direct": (
        Tile(m=128, n=128, group_m=2),
        Tile(m=128, n=128, group_m=2),
        6,
        2,
        {"multicast": True, "direct": True},
    ),
    "two rings": (Tile(m=128, n=256), Tile(m=64, n=128), 3, 4, {}),
    "two rings, wide down": (Tile(m=64, n=128), Tile(m=128, n=192), 6, 3, {}),
    "two rings, direct": (Tile(m=64, n=128), Tile(m=64, n=256), 7, 2, {"direct": True}),
    "two rings, split": (
        Tile(m=64, n=128, split_k=2),
        Tile(m=64, n=256, split_k=2),
        7,
        2,
        {"direct": True},
    ),
    "swapped": (Tile(m=80, n=128), Tile(m=80, n=128), 6, 2, {"swap_ab": True}),
    "swapped, one group": (Tile(m=112, n=64), Tile(m=112, n=64), 8, 1, {"swap_ab": True}),
    "swapped, 256 rows": (Tile(m=256, n=128), Tile(m=256, n=128), 3, 2, {"swap_ab": True}),
    "swapped, multicast": (
        Tile(m=64, n=128, group_m=2),
        Tile(m=64, n=128, group_m=2),
        6,
        2,
        {"multicast": True, "swap_ab": True},
    ),
    "swapped, two rings": (Tile(m=152, n=128), Tile(m=104, n=128), 4, 2, {"swap_ab": True}),
    "swapped, two rings, multicast": (
        Tile(m=64, n=128, group_m=4),
        Tile(m=128, n=128, group_m=2),
        7,
        2,
        {"multicast": True, "swap_ab": True},
    ),
    "swapped, split": (
        Tile(m=144, n=128, split_k=2),
        Tile(m=144, n=128, split_k=2),
        4,
        2,
        {"swap_ab": True},
    ),
    "swapped, split 4, one group": (
        Tile(m=96, n=64, split_k=4),
        Tile(m=96, n=64, split_k=4),
        7,
        1,
        {"swap_ab": True},
    ),
    "swapped, split of up": (
        Tile(m=112, n=64, split_k=2),
        Tile(m=104, n=64),
        7,
        1,
        {"swap_ab": True},
    ),
    "swapped, split of down": (
        Tile(m=72, n=128),
        Tile(m=80, n=128, split_k=2),
        6,
        3,
        {"swap_ab": True},
    ),
    "swapped, split of up, multicast": (
        Tile(m=128, n=128, split_k=2),
        Tile(m=128, n=128, group_m=2),
        5,
        2,
        {"multicast": True, "swap_ab": True},
    ),
    "swapped, split of down, multicast": (
        Tile(m=64, n=128, group_m=4),
        Tile(m=80, n=128, split_k=2),
        6,
        2,
        {"multicast": True, "swap_ab": True},
    ),
    "split of up, multicast": (
        Tile(m=128, n=128, split_k=2),
        Tile(m=128, n=128, group_m=2),
        4,
        2,
        {"multicast": True},
    ),
    "split of down, multicast": (
        Tile(m=128, n=256, group_m=2),
        Tile(m=64, n=128, split_k=2),
        3,
        4,
        {"multicast": True},
    ),
    "two rings, multicast": (
        Tile(m=128, n=256, group_m=2),
        Tile(m=128, n=128, group_m=2),
        4,
        2,
        {"multicast": True},
    ),
}


def featured(name: str, gpus: int) -> Config:
    up, down, stages, slabs, more = FEATURES[name]
    split = default_split(gpus)
    return Config(up=up, down=down, stages=stages, d_slabs=slabs, stage_split=split, **more)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("sizes", RAGGED, ids=lambda s: "x".join(map(str, s)))
def test_every_feature_at_ragged_sizes(proves, gpus, name, sizes):
    gpus_or_skip(gpus, proves)
    m, k, h, n = sizes
    problem, config = Problem(m=m, k=k, h=h, n=n, gpus=gpus), featured(name, gpus)
    if config.multicast and m <= 128:
        pytest.skip("a multicast pair needs two tile rows")
    assert why_invalid(config, problem) is None
    assert proves(problem, config)


SWAPPED = [
    "swapped",
    "swapped, one group",
    "swapped, multicast",
    "swapped, split",
    "swapped, split 4, one group",
]


@pytest.mark.parametrize("gpus", [2, 3, 4])
@pytest.mark.parametrize("name", SWAPPED)
@pytest.mark.parametrize("sizes", RAGGED, ids=lambda s: "x".join(map(str, s)))
def test_swapped_tiles_sum_over_gpus(proves, gpus, name, sizes):
    gpus_or_skip(gpus, proves)
    m, k, h, n = sizes
    problem = Problem(m=m, k=k, h=h, n=n, gpus=gpus)
    prove_sum(proves, problem, featured(name, gpus))


IN_PIPELINES = [
    "split 2, direct",
    "split 2, slabs",
    "multicast",
    "two rings",
    "swapped, two rings, multicast",
    "swapped, two rings",
    "swapped, split of up, multicast",
    "swapped, split of down",
]


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("output", ["replicated", "sharded", "last"])
@pytest.mark.parametrize("mix", [0.5, 0.0])
@pytest.mark.parametrize("name", IN_PIPELINES)
def test_features_in_a_pipeline(proves, name, mix: float, output: Output, gpus: int):
    gpus_or_skip(gpus, proves)
    problem = Problem(m=512 if "multicast" in name else 384, k=128, h=768, n=520, gpus=gpus)
    problem = replace(problem, output=output)
    config = replace(featured(name, gpus), mix=mix)
    assert why_invalid(config, problem) is None
    assert proves(problem, config)


ON_ONE_CLUSTER = [
    "split 2, slabs",
    *(name for name in FEATURES if "swapped" in name),
    "split of up, multicast",
    "split of down, multicast",
]


@pytest.mark.parametrize("k", [64, 512])  # one K block, which one part of a split tile sums; eight
@pytest.mark.parametrize("name", ON_ONE_CLUSTER)
def test_many_tiles_on_one_cluster(proves, name, k):
    """Rings of stages, slabs and partial sums turn many times."""
    config = featured(name, 1)
    problem = Problem(m=200, k=k, h=1024, n=1024, gpus=1)
    config = replace(config, ctas=config.cluster)
    assert why_invalid(config, problem) is None
    assert proves(problem, config)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("name", ["split 2, direct", "split 4, slabs", "two rings", *SWAPPED])
def test_a_feature_that_does_not_wait_is_caught(proves, gpus, name):
    gpus_or_skip(gpus, proves)
    problem = Problem(m=128, k=1024, h=2048, n=1024, gpus=gpus)
    assert why_invalid(featured(name, gpus), problem) is None
    try:
        right = proves(problem, featured(name, gpus), skip_wait=True)
    except CtatuneError:
        right = False
    assert not right


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_runner_that_does_not_wait_is_caught(proves, gpus):
    """The negative control: verification must see a kernel that skips the wait."""
    gpus_or_skip(gpus, proves)
    problem = Problem(m=512, k=1024, h=2048, n=1024, gpus=gpus)
    try:
        right = proves(problem, config_of(gpus, Family(128, 256, 4)), skip_wait=True)
    except CtatuneError:
        right = False
    assert not right


@pytest.mark.real  # ranks that share a GPU run too much in step
@pytest.mark.parametrize("family", [Family(128, 256, 4), Family(64, 64, 2, split_k=2, direct=True)])
def test_sums_over_gpus_that_do_not_wait_are_caught(proves, family):
    gpus_or_skip(2, proves)
    problem = Problem(m=512, k=1024, h=2048, n=1024, gpus=2)
    try:
        config = replace(config_of(2, family), down_axis="h")
        right = proves(problem, config, skip_wait=True)
    except CtatuneError:
        right = False
    assert not right
