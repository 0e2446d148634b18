"""The NumPy executor: right where a schedule is right, loud where it is corrupted."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ctatune.config import Config, Tile
from ctatune.errors import ScheduleError
from ctatune.problem import OUTPUTS, Output, Problem
from ctatune.reference import execute, expected, part_of, round_bf16
from ctatune.schedule import DOWN, NOTHING, UP, Columns, Schedule, alone, build

Matrix = NDArray[np.float32]
Inputs = tuple[Matrix, Matrix, Matrix]


def inputs(problem: Problem, seed: int = 0, *, exact: bool = True) -> Inputs:
    """Small integers, whose sums are exact in any order, or numbers whose sums depend on it."""
    rng = np.random.default_rng(seed)
    shapes = ((problem.m, problem.k), (problem.h, problem.k), (problem.n, problem.h))
    draws = (rng.integers(-3, 4, s) if exact else rng.standard_normal(s) for s in shapes)
    x, up, down = (values.astype(np.float32) for values in draws)
    return x, up, down


def make(
    mix: float = 0.5, *, gpus: int = 2, output: Output = "replicated", split_k: int = 1
) -> Schedule:
    problem = Problem(m=200, k=72, h=328, n=264, gpus=gpus, output=output)
    up, down = Tile(m=64, n=64, split_k=split_k), Tile(m=128, n=64, split_k=split_k)
    split = (max(1, gpus // 2), gpus - max(1, gpus // 2))
    config = Config(up=up, down=down, stages=3, d_slabs=4, mix=mix, stage_split=split)
    return build(problem, config)


def check(schedule: Schedule, results: list[Matrix], wanted: Matrix) -> None:
    """What is promised equals the wanted bits; what is not stays poisoned."""
    problem = schedule.problem
    for gpu, y2 in enumerate(results):
        part = schedule.columns[DOWN][gpu]
        promised = {
            "replicated": slice(None),
            "sharded": slice(part.start, part.stop),
            "last": slice(0, problem.n if gpu == problem.gpus - 1 else 0),
        }[problem.output]
        mask = np.ones(problem.n, bool)
        mask[promised] = False
        np.testing.assert_array_equal(y2[:, promised], wanted[:, promised])
        assert np.isnan(y2[:, mask]).all()


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(("gpus", "mix"), [(1, 1.0), (2, 1.0), (2, 0.5), (2, 0.0), (5, 0.3)])
def test_ragged_sizes_are_exact(output: Output, gpus: int, mix: float) -> None:
    schedule = make(mix, gpus=gpus, output=output)
    data = inputs(schedule.problem)
    check(schedule, execute(schedule, *data), expected(*data))


tiles = st.builds(
    Tile,
    m=st.sampled_from([16, 32, 64, 128]),
    n=st.sampled_from([64, 128, 192]),
    group_m=st.integers(1, 4),
)
sizes = st.integers(1, 40).map(lambda n: 8 * n)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    gpus = draw(st.integers(1, 8))
    problem = Problem(
        m=draw(st.integers(1, 300)),
        k=draw(sizes),
        h=draw(sizes),
        n=draw(sizes),
        gpus=gpus,
        output=draw(st.sampled_from(OUTPUTS)),
    )
    p_up = draw(st.integers(1, max(1, gpus - 1)))
    splits = st.sampled_from([1, draw(st.sampled_from([1, 2, 4]))])
    config = Config(
        up=replace(draw(tiles), split_k=draw(splits)),
        down=replace(draw(tiles), split_k=draw(splits)),
        stages=3,
        d_slabs=4,
        stage_split=(p_up, gpus - p_up),
        mix=draw(st.floats(0, 1)) if gpus > 1 else 1.0,
    )
    return build(problem, config)


@settings(max_examples=40, deadline=None)
@given(schedules(), st.integers(1, 6), st.integers(0, 10**6))
def test_any_schedule_in_any_order(schedule: Schedule, ctas: int, seed: int) -> None:
    values = inputs(schedule.problem, seed)
    check(schedule, execute(schedule, *values, ctas=ctas, order_seed=seed), expected(*values))


@settings(max_examples=30, deadline=None)
@given(schedules(), st.integers(1, 6), st.integers(0, 10**6))
def test_alone_on_one_gpu_gives_the_same_bits(schedule: Schedule, ctas: int, seed: int) -> None:
    values = inputs(schedule.problem, seed, exact=False)
    (single,) = execute(alone(schedule), *values, ctas=3)
    check(schedule, execute(schedule, *values, ctas=ctas, order_seed=seed), single)


def test_another_order_of_sums_gives_other_bits() -> None:
    """The negative control of the test above: every tile begins with segment 0."""
    schedule = make(1.0, gpus=4)
    values = inputs(schedule.problem, exact=False)
    same = alone(schedule)
    other = same.tiles[0].copy()
    other[other[:, 0] == DOWN, 4] = 0
    (right,), (wrong,) = execute(same, *values), execute(with_tiles(same, 0, other), *values)
    np.testing.assert_allclose(wrong, right, rtol=1e-3, atol=1e-2)
    assert not np.array_equal(wrong, right)


def test_expected_rounds_y1_to_bf16() -> None:
    """257 has nine significant bits: bf16 makes 256 of it."""
    x, up, down = (np.array([[v]], np.float32) for v in (257, 1, 3))
    assert expected(x, up, down) == 768


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mix", [0.0, 1.0])
@pytest.mark.parametrize("split_k", [1, 2])
def test_without_the_wait_results_are_wrong(mix: float, seed: int, split_k: int) -> None:
    schedule = make(mix, split_k=split_k)
    results = execute(schedule, *inputs(schedule.problem), order_seed=seed, skip_wait=True)
    assert any(np.isnan(y2).any() for y2 in results)


def with_tiles(schedule: Schedule, gpu: int, tiles: NDArray[np.int32]) -> Schedule:
    lists = list(schedule.tiles)
    lists[gpu] = tiles
    return replace(schedule, tiles=tuple(lists))


def run(schedule: Schedule) -> list[Matrix]:
    return execute(schedule, *inputs(schedule.problem))


def test_a_tile_twice_is_refused() -> None:
    good = make()
    twice = np.concatenate([good.tiles[0], good.tiles[0][-1:]])
    with pytest.raises(ScheduleError, match=r"down tile at row .* a second time on GPU 0"):
        run(with_tiles(good, 0, twice))


def test_overlapping_tiles_of_two_gpus_are_refused() -> None:
    good = make()
    row = good.tiles[1][:1]
    stolen = np.concatenate([row + np.array([0, 0, 0, -64, 0], np.int32), good.tiles[1][1:]])
    with pytest.raises(ScheduleError, match=r"up tile at row 0, .* a second time"):
        run(with_tiles(good, 1, stolen))


def test_a_missing_up_tile_blocks_and_says_where() -> None:
    good = make()
    with pytest.raises(
        ScheduleError, match="GPU 0 waits for panel 0, segment 0, target 4, value 3"
    ):
        run(with_tiles(good, 0, good.tiles[0][1:]))


def test_a_cta_passes_its_own_segment_and_blocks_at_the_peers() -> None:
    """GPU 1 lacks a tile of its own: GPU 0 notices after its own segment, GPU 1 at the start."""
    good = make()
    broken = with_tiles(good, 1, good.tiles[1][1:])
    with pytest.raises(
        ScheduleError, match="GPU 0 waits for panel 0, segment 1, target 2, value 1"
    ):
        run(broken)
    idle = with_tiles(broken, 0, broken.tiles[0][broken.tiles[0][:, 0] == UP])
    with pytest.raises(
        ScheduleError, match="GPU 1 waits for panel 0, segment 1, target 2, value 1"
    ):
        run(idle)


def test_an_up_tile_counted_in_another_segment_blocks() -> None:
    good = make()
    wrong = good.tiles[0].copy()
    wrong[0, 4] = 1
    with pytest.raises(
        ScheduleError, match="GPU 0 waits for panel 0, segment 0, target 4, value 3"
    ):
        run(with_tiles(good, 0, wrong))


def test_a_missing_down_tile_is_noticed() -> None:
    good = make()
    assert good.tiles[1][-1, 0] == DOWN
    with pytest.raises(ScheduleError, match="promised outputs were never stored on GPU 0"):
        run(with_tiles(good, 1, good.tiles[1][:-1]))


def test_down_before_up_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = Schedule.slots
    monkeypatch.setattr(Schedule, "slots", lambda self, gpu: forwards(self, gpu)[::-1])
    with pytest.raises(ScheduleError, match="all 2 unfinished CTAs are blocked"):
        execute(make(1.0), *inputs(make(1.0).problem), ctas=1)


def with_slots(
    monkeypatch: pytest.MonkeyPatch, edit: Callable[[NDArray[np.int32]], object]
) -> None:
    """Every schedule has its slots changed in place."""
    right = Schedule.slots

    def wrong(self: Schedule, gpu: int) -> NDArray[np.int32]:
        slots = right(self, gpu)
        edit(slots)
        return slots

    monkeypatch.setattr(Schedule, "slots", wrong)


def test_a_part_of_up_twice_blocks_the_whole_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part 1 of the first tile is part 0 again: neither can finish, and no `down` tile begins."""
    with_slots(monkeypatch, lambda slots: slots[1].__setitem__(5, 0))
    with pytest.raises(ScheduleError, match=r"all .* unfinished CTAs are blocked"):
        run(make(1.0, split_k=2))


def test_a_part_that_is_missing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The panel counts every part: with one tile of four gone, 6 of 8 arrive."""
    with_slots(monkeypatch, lambda slots: slots[:2].__setitem__((slice(None), 0), NOTHING))
    with pytest.raises(ScheduleError, match="waits for panel 0, segment 0, target 8, value 6"):
        run(make(split_k=2))


def test_parts_take_whole_blocks_of_k() -> None:
    parts = [part_of(Columns(64, 328), part, 4) for part in range(4)]
    assert parts == [(64, 128), (128, 192), (192, 256), (256, 328)]
    assert [part_of(Columns(0, 72), part, 4).width for part in range(4)] == [0, 64, 0, 8]


def test_y1_sent_to_too_few_blocks() -> None:
    good = make(1.0)
    with pytest.raises(
        ScheduleError, match="GPU 1 waits for panel 0, segment 1, target 3, value 0"
    ):
        run(replace(good, y1_gpus=(0,)))


def test_a_wrong_weight_row_gives_a_wrong_result() -> None:
    good = make()
    shifted = good.tiles[0].copy()
    shifted[shifted[:, 0] == UP, 2] = 0
    results = run(with_tiles(good, 0, shifted))
    assert not np.array_equal(results[0], expected(*inputs(good.problem)))


def test_round_bf16_known_values() -> None:
    ulp = 2.0**-7
    given_and_wanted = {
        1.0: 1.0,
        1 + ulp / 2: 1.0,  # a tie goes to the even neighbour, below
        1 + 3 * ulp / 2: 1 + 2 * ulp,  # and above
        1 + 0.51 * ulp: 1 + ulp,
        -(1 + 0.51 * ulp): -(1 + ulp),
        0.0: 0.0,
        np.inf: np.inf,
        -np.inf: -np.inf,
        np.nan: np.nan,
    }
    values = np.array(list(given_and_wanted), np.float32)
    wanted = np.array(list(given_and_wanted.values()), np.float32)
    np.testing.assert_array_equal(round_bf16(values), wanted)


@settings(deadline=None)
@given(st.floats(2.0**-120, 2.0**120, width=32))
def test_round_bf16_is_within_half_a_step_and_stable(value: float) -> None:
    rounded = round_bf16(np.array([value, -value], np.float32))
    assert abs(rounded[0] - value) <= value * 2.0**-8
    assert rounded[1] == -rounded[0]
    np.testing.assert_array_equal(round_bf16(rounded), rounded)
