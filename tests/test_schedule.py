"""Schedules: every output tile exactly once, columns that partition, up before down."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctatune.config import Config, Tile
from ctatune.limits import default_split, why_invalid
from ctatune.problem import OUTPUTS, Problem
from ctatune.schedule import (
    DOWN,
    NOTHING,
    PARTIAL,
    UP,
    Columns,
    Schedule,
    alone,
    build,
    shares,
    split_columns,
)

sizes = st.integers(1, 160).map(lambda n: 8 * n)
tiles = st.builds(
    Tile,
    m=st.sampled_from([64, 128, 256]),
    n=st.sampled_from([64, 128, 192, 256]),
    group_m=st.sampled_from([1, 2, 3, 8, 16]),
)
relaxed = settings(deadline=None)  # of one example: the machine may be busy


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    gpus = draw(st.integers(1, 8))
    p_up = draw(st.integers(1, gpus - 1)) if gpus > 1 else 1
    problem = Problem(
        m=draw(st.integers(1, 1200)),
        k=draw(sizes),
        h=draw(sizes),
        n=draw(sizes),
        gpus=gpus,
        output=draw(st.sampled_from(OUTPUTS)),
    )
    split = draw(st.sampled_from([1, 2, 4]))
    splits = st.sampled_from([1, split])
    config = Config(
        up=replace(draw(tiles), split_k=draw(splits)),
        down=replace(draw(tiles), split_k=draw(splits)),
        stages=3,
        d_slabs=4,
        mix=draw(st.floats(0, 1)) if gpus > 1 else 1.0,
        stage_split=(p_up, gpus - p_up),
        multicast=split <= 2 and draw(st.booleans()),
    )
    return build(problem, config)


def layer_tiles(schedule: Schedule) -> list[Tile]:
    return [schedule.config.up, schedule.config.down]


@relaxed
@given(schedules())
def test_every_output_tile_exactly_once(schedule: Schedule) -> None:
    seen = Counter((t[0], t[1], t[3]) for tiles in schedule.tiles for t in tiles.tolist())
    wanted = {
        (layer, row, col)
        for layer, tile in enumerate(layer_tiles(schedule))
        for row in range(0, schedule.problem.m, tile.m)
        for col in range(0, schedule.problem.layers[layer].outputs, tile.n)
    }
    assert set(seen) == wanted
    assert set(seen.values()) == {1}


@relaxed
@given(schedules())
def test_columns_partition_each_layer_in_whole_tiles(schedule: Schedule) -> None:
    for layer, tile in enumerate(layer_tiles(schedule)):
        parts, outputs = schedule.columns[layer], schedule.problem.layers[layer].outputs
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == outputs
        for part in parts:
            assert part.start % tile.n == 0 or not part.width
            assert part.stop % tile.n == 0 or part.stop == outputs


@relaxed
@given(schedules())
def test_tiles_lie_in_their_gpus_columns_and_weights(schedule: Schedule) -> None:
    for gpu, tiles_of_gpu in enumerate(schedule.tiles):
        for layer, _, local, col, _ in tiles_of_gpu.tolist():
            part = schedule.columns[layer][gpu]
            assert part.start <= col < part.stop
            assert local == col - part.start


@relaxed
@given(schedules(), st.integers(1, 132))
def test_up_precedes_down_in_each_cta(schedule: Schedule, ctas: int) -> None:
    for tiles_of_gpu in schedule.tiles:
        for cta in range(min(ctas, len(tiles_of_gpu))):
            layers = tiles_of_gpu[cta::ctas, 0]
            assert np.all(np.diff(layers) >= 0)


@relaxed
@given(schedules())
def test_a_down_tile_waits_for_exactly_the_panels_of_its_rows(schedule: Schedule) -> None:
    up_m, m = schedule.config.up.m, schedule.problem.m
    for tiles_of_gpu in schedule.tiles:
        for layer, row, *_ in tiles_of_gpu.tolist():
            if layer == DOWN:
                rows = range(row, min(row + schedule.config.down.m, m))
                assert set(schedule.panels_of(row)) == {r // up_m for r in rows}


@relaxed
@given(schedules())
def test_destinations_hold_what_they_read_and_what_is_promised(schedule: Schedule) -> None:
    problem = schedule.problem
    workers = {g for g in range(problem.gpus) if np.any(schedule.tiles[g][:, 0] == DOWN)}
    assert set(schedule.y1_gpus) == workers
    everyone = set(range(problem.gpus))
    for gpu in workers:
        wanted = {"replicated": everyone, "sharded": {gpu}, "last": {problem.gpus - 1}}
        assert set(schedule.y2_gpus[gpu]) == wanted[problem.output]
        assert all(gpu in schedule.senders(to) or to == gpu for to in schedule.y2_gpus[gpu])
    assert all(not schedule.y2_gpus[g] for g in everyone - workers)


@relaxed
@given(schedules())
def test_slots_hold_every_part_of_every_tile_once(schedule: Schedule) -> None:
    for gpu, tiles_of_gpu in enumerate(schedule.tiles):
        wanted = Counter(
            (*tile, part)
            for tile in tiles_of_gpu.tolist()
            for part in range(layer_tiles(schedule)[tile[0]].split_k)
        )
        found = [tuple(slot) for slot in schedule.slots(gpu).tolist() if slot[0] != NOTHING]
        assert Counter(found) == wanted
        assert [slot[0] for slot in found] == sorted(slot[0] for slot in found)  # up before down


@relaxed
@given(schedules())
def test_slots_come_in_whole_clusters_of_one_layer(schedule: Schedule) -> None:
    """A kernel of clusters deadlocks or sums wrongly otherwise: parts of a tile are neighbours."""
    cluster = schedule.config.cluster
    for gpu in range(schedule.problem.gpus):
        slots = schedule.slots(gpu)
        assert len(slots) % cluster == 0
        padding = 0
        for ctas in slots.reshape(-1, cluster, 6):
            layers = ctas[:, 0].tolist()
            assert layers == sorted(layers)  # what is empty stands behind tiles
            assert layers[0] != NOTHING
            assert set(layers) <= {layers[0], NOTHING}
            padding += layers[-1] == NOTHING
            split = layer_tiles(schedule)[layers[0]].split_k
            for parts in ctas[ctas[:, 0] != NOTHING].reshape(-1, split, 6).tolist():
                assert [slot[5] for slot in parts] == list(range(split))
                assert len({tuple(slot[:5]) for slot in parts}) == 1
        assert padding <= 2  # the last cluster of each layer


@relaxed
@given(st.integers(1, 6), st.integers(1, 4), sizes, sizes, st.integers(1, 4), st.integers(0, 2))
def test_a_multicast_pair_has_the_same_weights(
    pairs: int, groups: int, h: int, n: int, gpus: int, split_layer: int
) -> None:
    """Two CTAs that load one weight tile together have tiles one above the other; those of a layer
    that is split share one tile."""
    tile = Tile(m=128, n=256, group_m=2 * groups)
    up, down = (replace(tile, split_k=1 + (layer == split_layer)) for layer in (UP, DOWN))
    config = Config(up=up, down=down, stages=2, d_slabs=2, multicast=True)
    problem = Problem(m=256 * pairs - 100, k=64, h=h, n=n, gpus=gpus)
    config = replace(config, stage_split=default_split(gpus))
    assert why_invalid(config, problem) is None
    schedule = build(problem, config)
    for gpu in range(gpus):
        for upper, lower in schedule.slots(gpu).reshape(-1, 2, 6).tolist():
            if upper[0] == split_layer:
                assert (upper[:5], upper[5], lower[5]) == (lower[:5], 0, 1)
            else:
                assert lower == [upper[0], upper[1] + 128, *upper[2:]]
                assert upper[1] % 256 == 0


@relaxed
@given(schedules())
def test_a_panel_counts_every_part(schedule: Schedule) -> None:
    arrivals = Counter(
        (slot[1] // schedule.config.up.m, slot[4])
        for gpu in range(schedule.problem.gpus)
        for slot in schedule.slots(gpu).tolist()
        if slot[0] == UP
    )
    assert arrivals == {
        (panel, segment): count
        for panel in range(schedule.panels)
        for segment, count in enumerate(schedule.segment_arrivals)
    }


@relaxed
@given(schedules())
def test_segments_are_the_columns_of_the_gpus_that_compute_y1(schedule: Schedule) -> None:
    assert schedule.segments == tuple(part for part in schedule.columns[UP] if part.width)
    assert sum(segment.width for segment in schedule.segments) == schedule.problem.h
    for tiles_of_gpu in schedule.tiles:
        for layer, _, _, col, segment in tiles_of_gpu.tolist():
            if layer == UP:
                part = schedule.segments[segment]
                assert part.start <= col < part.stop


@relaxed
@given(schedules())
def test_a_down_tile_sums_every_segment_once_and_its_own_gpus_first(schedule: Schedule) -> None:
    count = len(schedule.segments)
    for own, tiles_of_gpu in zip(schedule.columns[UP], schedule.tiles, strict=True):
        for first in set(tiles_of_gpu[tiles_of_gpu[:, 0] == DOWN, 4].tolist()):
            circle = schedule.awaits(DOWN, first)
            assert sorted(circle) == list(range(count))
            assert all((b - a) % count == 1 % count for a, b in pairwise(circle))
            assert not own.width or schedule.segments[circle[0]] == own


@relaxed
@given(schedules())
def test_alone_has_the_same_tiles_with_the_same_sums_up_first(schedule: Schedule) -> None:
    single = alone(schedule)
    assert (single.y1_gpus, single.y2_gpus, len(single.tiles)) == ((0,), ((0,),), 1)
    assert single.segments == schedule.segments
    assert np.all(np.diff(single.tiles[0][:, 0]) >= 0)
    without_local = [0, 1, 3, 4]
    wanted = np.concatenate(schedule.tiles)[:, without_local].tolist()
    assert sorted(single.tiles[0][:, without_local].tolist()) == sorted(wanted)
    assert np.array_equal(single.tiles[0][:, 2], single.tiles[0][:, 3])
    assert [part.width for (part,) in single.columns] == [schedule.problem.h, schedule.problem.n]


@pytest.mark.parametrize(
    ("mix", "split", "up", "down"),
    [
        (0.0, (1, 1), [1.0, 0.0], [0.0, 1.0]),
        (1.0, (1, 1), [0.5, 0.5], [0.5, 0.5]),
        (0.5, (1, 1), [0.75, 0.25], [0.25, 0.75]),
        (0.0, (2, 1), [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]),
        (0.4, (3, 1), [0.3, 0.3, 0.3, 0.1], [0.1, 0.1, 0.1, 0.7]),
    ],
)
def test_shares(mix: float, split: tuple[int, int], up: list[float], down: list[float]) -> None:
    tile = Tile(m=128, n=128)
    config = Config(up=tile, down=tile, stages=6, d_slabs=2, mix=mix, stage_split=split)
    assert shares(UP, config, sum(split)) == pytest.approx(up)
    assert shares(DOWN, config, sum(split)) == pytest.approx(down)


def test_split_columns_keeps_a_ragged_end_on_the_last_owner() -> None:
    parts = split_columns(328, 128, [0.5, 0.5, 0.0])
    assert parts == (Columns(0, 256), Columns(256, 328), Columns(328, 328))


@relaxed
@given(st.integers(1, 10**6), st.sampled_from([64, 128, 256]), st.integers(1, 8))
def test_even_split_differs_by_at_most_one_tile(count: int, tile_n: int, gpus: int) -> None:
    parts = split_columns(count, tile_n, [1 / gpus] * gpus)
    tiles_of = [-(-part.width // tile_n) for part in parts]
    assert max(tiles_of) - min(tiles_of) <= 1


@st.composite
def reductions(draw: st.DrawFn) -> Schedule:
    """Schedules that sum Y2 over GPUs."""
    gpus = draw(st.integers(2, 8))
    tile = replace(draw(tiles), split_k=draw(st.sampled_from([1, 2, 4])))
    up, down = (replace(tile, n=draw(st.sampled_from([64, 128, 192, 256]))) for _ in range(2))
    problem = Problem(
        m=draw(st.integers(1, 1200)),
        k=draw(sizes),
        h=(gpus - 1) * up.n + draw(sizes),
        n=draw(sizes),
        gpus=gpus,
        output=draw(st.sampled_from(OUTPUTS)),
    )
    config = Config(up=up, down=down, stages=3, d_slabs=4, down_axis="h")
    return build(problem, replace(config, stage_split=default_split(gpus)))


@relaxed
@given(reductions())
def test_every_output_is_summed_over_every_segment_once(schedule: Schedule) -> None:
    seen = Counter(
        (row, col, segment, layer == DOWN)
        for tiles_of_gpu in schedule.tiles
        for layer, row, _, col, segment in tiles_of_gpu.tolist()
        if layer != UP
    )
    assert set(seen.values()) == {1}
    for row in range(0, schedule.problem.m, schedule.config.down.m):
        for col in range(0, schedule.problem.n, schedule.config.down.n):
            owner = schedule.owner(col)
            assert all((row, col, g, g == owner) in seen for g in range(schedule.problem.gpus))
    assert len(seen) == sum(np.sum(tiles[:, 0] != UP) for tiles in schedule.tiles)


@relaxed
@given(reductions(), st.integers(1, 132))
def test_partial_sums_precede_what_waits_for_them(schedule: Schedule, ctas: int) -> None:
    place = np.array([0, 2, 1])  # up, partial, down
    for single in (schedule, alone(schedule)):
        for tiles_of_gpu in single.tiles:
            for cta in range(min(ctas, len(tiles_of_gpu))):
                assert np.all(np.diff(place[tiles_of_gpu[cta::ctas, 0]]) >= 0)


@relaxed
@given(reductions())
def test_partial_sums_arrive_in_columns_of_their_own(schedule: Schedule) -> None:
    for single in (schedule, alone(schedule)):
        taken = [np.zeros(single.y1_width, bool) for _ in single.tiles]
        arrived = [Counter[int]() for _ in single.tiles]
        for tiles_of_gpu in single.tiles:
            for layer, row, _, col, segment in tiles_of_gpu.tolist():
                if layer != PARTIAL or row:
                    continue
                owner = single.owner(col)
                first = single.partial_column(owner) + segment * single.partial_width + col
                own = slice(first, first + single.config.down.n)
                assert first >= single.problem.h
                assert own.stop <= single.y1_width
                assert not taken[owner][own].any()
                taken[owner][own] = True
                arrived[owner][segment] += single.config.down.split_k
        for gpu, counts in enumerate(arrived):
            assert list(single.arrivals(gpu)[: len(single.segments)]) == list(
                single.segment_arrivals
            )
            found = [counts[segment] for segment in range(len(single.segments))]
            assert list(single.arrivals(gpu)[len(single.segments) :]) == found


@relaxed
@given(reductions())
def test_a_gpu_that_sums_over_its_segment_holds_those_columns_of_the_weights(schedule) -> None:
    held = [schedule.w_down_held(gpu) for gpu in range(schedule.problem.gpus)]
    assert [columns for _, columns in held] == list(schedule.segments)
    assert all(rows == Columns(0, schedule.problem.n) for rows, _ in held)
    for tiles_of_gpu in schedule.tiles:
        down = tiles_of_gpu[tiles_of_gpu[:, 0] != UP]
        assert np.array_equal(down[:, 2], down[:, 3])


GOLDEN = """\
gpu 0 up 0:256 down 0:64 sums 0 1
  up   0+0 64+0 0+64 64+64 0+128 64+128 0+192 64+192 128+0 128+64 128+128 128+192
  down 0+0 128+0
gpu 1 up 256:264 down 64:200 sums 1 0
  up   0+256 64+256 128+256
  down 0+64 0+128 0+192 128+64 128+128 128+192
Y1 to 0 1, Y2 to 1 1, 3 panels of 4+1 tiles"""


def as_text(schedule: Schedule) -> str:
    lines = []
    for gpu, tiles_of_gpu in enumerate(schedule.tiles):
        up, down = (columns[gpu] for columns in schedule.columns)
        circle = " ".join(map(str, schedule.awaits(DOWN, int(tiles_of_gpu[-1, 4]))))
        lines.append(
            f"gpu {gpu} up {up.start}:{up.stop} down {down.start}:{down.stop} sums {circle}"
        )
        for layer, name in ((UP, "up  "), (DOWN, "down")):
            order = " ".join(f"{t[1]}+{t[3]}" for t in tiles_of_gpu.tolist() if t[0] == layer)
            lines.append(f"  {name} {order}")
    y1 = " ".join(map(str, schedule.y1_gpus))
    y2 = " ".join("+".join(map(str, to)) for to in schedule.y2_gpus)
    panels = f"{schedule.panels} panels of {'+'.join(map(str, schedule.segment_arrivals))} tiles"
    return "\n".join([*lines, f"Y1 to {y1}, Y2 to {y2}, {panels}"])


def test_golden_schedule() -> None:
    """Ragged in every size; row+column of each tile in the order of the list."""
    problem = Problem(m=136, k=72, h=264, n=200, gpus=2, output="last")
    config = Config(
        up=Tile(m=64, n=64, group_m=2),
        down=Tile(m=128, n=64),
        stages=4,
        d_slabs=2,
        mix=0.5,
    )
    assert as_text(build(problem, config)) == GOLDEN
