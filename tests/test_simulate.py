"""The simulator: timelines that can be computed by hand, and what must hold for any of them."""

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from test_latency import cases

from ctatune.config import Config, Tile
from ctatune.latency import roofline_us
from ctatune.machine_model import MachineModel, load
from ctatune.problem import Output, Problem
from ctatune.reference import ScheduleError
from ctatune.schedule import DOWN, UP, build
from ctatune.simulate import TileSpan, Timeline, run, simulate
from ctatune.space import default_split

MACHINE = load()


def round_machine() -> MachineModel:
    """Four SMs, 1 us a K-step of a 128x128 tile, 1 us a tile, 1 us a tile on the link.

    Memory, epilogue and local stores cost nothing; a flag costs 0.5 us, the launch 10.
    """
    endless = 1e12
    return replace(
        MACHINE,
        platform=replace(MACHINE.platform, sm_count=4),
        peak_tflops=endless,
        peak_hbm_gbps=endless,
        tensor_tflops=4 * 2 * 128 * 128 * 64 * 1e-6,
        l2_gbps=endless,
        sm_port_gbps=endless,
        smem_gbps=endless,
        hbm_gbps=endless,
        link_gbps=128 * 128 * 2 * 1e-3,
        local_store_gbps=endless,
        flag_us=0.5,
        launch_us=10.0,
        tile_us=1.0,
        epilogue_gbps=endless,
        droop_fraction=0.0,
    )


def tiny(output: Output, *, mix: float = 1.0, ctas: int = 0, slabs: int = 2) -> Timeline:
    problem = Problem(m=128, k=64, h=512, n=256, gpus=2, output=output)
    tile = Tile(m=128, n=128)
    config = Config(up=tile, down=tile, stages=2, d_slabs=slabs, mix=mix, ctas=ctas)
    return run(build(problem, config), round_machine())


def as_text(timeline: Timeline) -> str:
    lines = [
        f"gpu {t.gpu} cta {t.cta} {('up', 'down')[t.layer]} {t.row}+{t.col} "
        f"{t.start_us:.2f} {t.end_us:.2f}"
        for t in timeline.tiles
    ]
    return "\n".join([*lines, f"end {timeline.total_us:.2f}"])


def test_golden_tensor_parallel() -> None:
    """Two `up` tiles a GPU end at 12 and leave one after the other: 13, 14. With the flag, the
    panel is complete at 14.5. `down` takes 8 K-steps and 1, the link 1, the flag 0.5.
    """
    assert as_text(tiny("replicated")) == (
        "gpu 0 cta 0 up 0+0 10.00 12.00\n"
        "gpu 0 cta 1 up 0+128 10.00 12.00\n"
        "gpu 1 cta 0 up 0+256 10.00 12.00\n"
        "gpu 1 cta 1 up 0+384 10.00 12.00\n"
        "gpu 0 cta 2 down 0+0 14.50 23.50\n"
        "gpu 1 cta 2 down 0+128 14.50 23.50\n"
        "end 25.00"
    )


def test_golden_pipeline() -> None:
    """GPU 0 sends all four tiles through one port; GPU 1 keeps its result."""
    assert as_text(tiny("sharded", mix=0.0)) == (
        "gpu 0 cta 0 up 0+0 10.00 12.00\n"
        "gpu 0 cta 1 up 0+128 10.00 12.00\n"
        "gpu 0 cta 2 up 0+256 10.00 12.00\n"
        "gpu 0 cta 3 up 0+384 10.00 12.00\n"
        "gpu 1 cta 0 down 0+0 16.50 25.50\n"
        "gpu 1 cta 1 down 0+128 16.50 25.50\n"
        "end 25.50"
    )


def test_golden_single_cta_with_few_slabs() -> None:
    """Half a tile of slabs: the CTA goes on when half of its transfer (1 us) is through."""
    spans = [t for t in tiny("sharded", ctas=1, slabs=1).tiles if t.gpu == 0]
    times_us = [time_us for tile in spans for time_us in (tile.start_us, tile.end_us)]
    assert times_us == pytest.approx([10, 12, 12.5, 14.5, 16, 25])


def test_output_on_the_last_gpu_arrives_with_a_flag() -> None:
    assert tiny("sharded").total_us == pytest.approx(23.5)
    assert tiny("last").total_us == pytest.approx(25.0)


def test_a_receivers_port_is_shared_by_its_senders() -> None:
    """Three GPUs send one tile each to the fourth: the last is there after 3 us, not after 1."""
    problem = Problem(m=128, k=64, h=384, n=128, gpus=4, output="last")
    tile = Tile(m=128, n=128)
    config = Config(up=tile, down=tile, stages=2, d_slabs=2, mix=0.0, stage_split=(3, 1))
    down = run(build(problem, config), round_machine()).tiles[-1]
    assert (down.gpu, down.layer, down.start_us) == (3, DOWN, pytest.approx(12 + 3 + 0.5))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_timeline_obeys_the_schedule(case) -> None:
    problem, config = case
    schedule = build(problem, config)
    timeline = run(schedule, MACHINE)
    check_coverage(timeline, [tiles.tolist() for tiles in schedule.tiles])
    computed = np.zeros(schedule.panels)
    for tile in timeline.tiles:
        if tile.layer == UP:
            panel = tile.row // config.up.m
            computed[panel] = max(computed[panel], tile.end_us)
    for tile in timeline.tiles:
        assert tile.start_us < tile.end_us <= timeline.total_us
        if tile.layer == DOWN:
            ready_us = max(computed[panel] for panel in schedule.panels_of(tile.row))
            assert tile.start_us >= ready_us + MACHINE.flag_us
    assert timeline.total_us > roofline_us(problem, MACHINE, problem.gpus)


def check_coverage(timeline: Timeline, lists: list[list[list[int]]]) -> None:
    """Each CTA ran its share of the list in order, one tile at a time."""
    by_cta: dict[tuple[int, int], list[TileSpan]] = {}
    for tile in timeline.tiles:
        by_cta.setdefault((tile.gpu, tile.cta), []).append(tile)
    for (gpu, cta), spans in by_cta.items():
        wanted = [(layer, row, col) for layer, row, _, col in lists[gpu][cta::132]]
        assert [(t.layer, t.row, t.col) for t in spans] == wanted
        assert all(a.end_us <= b.start_us for a, b in pairwise(spans))
    assert len(timeline.tiles) == sum(map(len, lists))


@settings(max_examples=15, deadline=None)
@given(cases())
def test_the_same_input_gives_the_same_timeline(case) -> None:
    assert run(build(*case), MACHINE) == run(build(*case), MACHINE)


def test_pure_pipeline_is_slower_than_tensor_parallel_at_1024_tokens() -> None:
    problem = Problem(m=1024, k=8192, h=8192, n=8192, gpus=2, output="sharded")
    tile = Tile(m=128, n=256)
    config = Config(up=tile, down=tile, stages=3, d_slabs=4)
    parallel = simulate(problem, config, MACHINE).latency_us
    assert simulate(problem, replace(config, mix=0.0), MACHINE).latency_us > 1.3 * parallel


def test_a_slower_link_is_never_faster() -> None:
    problem = Problem(m=2048, k=4096, h=8192, n=4096, gpus=4)
    tile = Tile(m=128, n=256)
    config = Config(up=tile, down=tile, stages=3, d_slabs=4, stage_split=(2, 2))
    links = (368.0, 100.0, 25.0)
    times_us = [
        simulate(problem, config, replace(MACHINE, link_gbps=link)).latency_us for link in links
    ]
    assert times_us == sorted(times_us)
    sent_bytes = 2 * 2048 * (8192 + 4096) / 4 * 3
    assert times_us[-1] > sent_bytes / 25e3


def test_a_missing_tile_is_an_error_not_a_hang() -> None:
    problem = Problem(m=128, k=64, h=512, n=256, gpus=2)
    tile = Tile(m=128, n=128)
    good = build(problem, Config(up=tile, down=tile, stages=2, d_slabs=2))
    broken = replace(good, tiles=(good.tiles[0][1:], good.tiles[1]))
    with pytest.raises(ScheduleError, match="waits for panel 0 for ever, target 4, value 3"):
        run(broken, MACHINE)


@pytest.mark.parametrize("output", ["replicated", "sharded", "last"])
def test_eight_gpus_in_time(output: Output) -> None:
    problem = Problem(m=8192, k=8192, h=28672, n=8192, gpus=8, output=output)
    tile = Tile(m=128, n=256, group_m=8)
    config = Config(up=tile, down=tile, stages=3, d_slabs=4, stage_split=default_split(8))
    start = time.perf_counter()
    eight = simulate(problem, config, MACHINE.for_gpus(8)).latency_us
    assert time.perf_counter() - start < 2.0
    four = simulate(
        replace(problem, gpus=4), replace(config, stage_split=(2, 2)), MACHINE.for_gpus(4)
    ).latency_us
    assert roofline_us(problem, MACHINE, 8) < eight < four
