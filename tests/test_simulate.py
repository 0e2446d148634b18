"""The simulator: timelines that can be computed by hand, and what must hold for any of them."""

import time
from bisect import bisect_right
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fakes import design_machine
from hypothesis import given, settings
from test_latency import cases

from ctatune.config import Config, Tile
from ctatune.errors import ScheduleError
from ctatune.latency import gpu_parts
from ctatune.limits import default_split, resident_ctas
from ctatune.machine_model import MachineModel
from ctatune.problem import Output, Problem
from ctatune.schedule import DOWN, NOTHING, UP, Schedule, build
from ctatune.simulate import TileSpan, Timeline, run, simulate

MACHINE = design_machine()


def round_machine() -> MachineModel:
    """Four SMs, 1 us a K-step of a 128x128 tile, 1 us a tile, 1 us a tile on the link.

    Memory, epilogue, local stores and bursts cost nothing; a flag costs 0.5 us, the launch 10.
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
        hbm_gbps=endless,
        link_gbps=128 * 128 * 2 * 1e-3,
        local_store_gbps=endless,
        flag_us=0.5,
        launch_us=10.0,
        burst_loss=0.0,
        tile_us=1.0,
        epilogue_gbps=endless,
        flop_pj=1e-12,
        l2_pj=1e-12,
        hbm_pj=1e-12,
    )


def tiny(output: Output, machine: MachineModel | None = None, **changes: Any) -> Timeline:
    problem = Problem(m=128, k=64, h=512, n=256, gpus=2, output=output)
    tile = Tile(m=128, n=128)
    config = replace(Config(up=tile, down=tile, stages=2, d_slabs=2), **changes)
    return run(build(problem, config), machine or round_machine())


def times_of_gpu_0(timeline: Timeline) -> list[float]:
    spans = [t for t in timeline.tiles if t.gpu == 0]
    return [time_us for tile in spans for time_us in (tile.start_us, tile.end_us)]


def as_text(timeline: Timeline) -> str:
    lines = [
        f"gpu {t.gpu} cta {t.cta} {('up', 'down')[t.layer]} {t.row}+{t.col} "
        f"{t.start_us:.2f} {t.end_us:.2f}"
        for t in timeline.tiles
    ]
    return "\n".join([*lines, f"end {timeline.total_us:.2f}"])


def test_golden_tensor_parallel() -> None:
    """Two `up` tiles a GPU end at 12; its own are there at once. They leave one after the other
    and with the flag are all there at 14.5, before the first half of `down` is summed. `down` takes
    8 K-steps and 1, the link 1, the flag 0.5.
    """
    assert as_text(tiny("replicated")) == (
        "gpu 0 cta 0 up 0+0 10.00 12.00\n"
        "gpu 0 cta 1 up 0+128 10.00 12.00\n"
        "gpu 1 cta 0 up 0+256 10.00 12.00\n"
        "gpu 1 cta 1 up 0+384 10.00 12.00\n"
        "gpu 0 cta 2 down 0+0 12.00 21.00\n"
        "gpu 1 cta 2 down 0+128 12.00 21.00\n"
        "end 22.50"
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
    times_us = times_of_gpu_0(tiny("sharded", ctas=1, d_slabs=1))
    assert times_us == pytest.approx([10, 12, 12.5, 14.5, 15, 24])


def test_golden_stall_in_the_middle_of_a_sum() -> None:
    """A link four times as slow: the peer's half is there at 12 + 8 + 0.5, the own half is summed
    at 12 + 4.5, and the other half takes as long again.
    """
    slow = replace(round_machine(), link_gbps=round_machine().link_gbps / 4)
    assert times_of_gpu_0(tiny("sharded", slow))[-2:] == pytest.approx([12, 25])


def test_own_tiles_are_there_after_the_local_store_without_a_flag() -> None:
    """A local store of one tile by one SM of four takes 2 us."""
    machine = replace(round_machine(), local_store_gbps=128 * 128 * 2 * 4 / 2 * 1e-3)
    assert times_of_gpu_0(tiny("sharded", machine))[-2:] == pytest.approx([14, 23])


def test_output_on_the_last_gpu_arrives_with_a_flag() -> None:
    assert tiny("sharded").total_us == pytest.approx(21.0)
    assert tiny("last").total_us == pytest.approx(22.5)


def test_a_receivers_port_is_shared_by_its_senders() -> None:
    """Three GPUs send one tile each to the fourth: the last is there after 12 us, not after 4.
    The third of a sum that it gives takes a third of 7 us.
    """
    problem = Problem(m=128, k=64, h=384, n=128, gpus=4, output="last")
    tile = Tile(m=128, n=128)
    config = Config(up=tile, down=tile, stages=2, d_slabs=2, mix=0.0, stage_split=(3, 1))
    slow = replace(round_machine(), link_gbps=round_machine().link_gbps / 4)
    down = run(build(problem, config), slow).tiles[-1]
    assert (down.gpu, down.layer, down.start_us) == (3, DOWN, pytest.approx(12 + 4 + 0.5))
    assert down.end_us == pytest.approx(12 + 12 + 0.5 + 7 / 3)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_timeline_obeys_the_schedule(case) -> None:
    problem, config = case
    schedule = build(problem, config)
    timeline = run(schedule, MACHINE)
    check_coverage(timeline, schedule)
    for tile in timeline.tiles:
        assert tile.start_us < tile.end_us <= timeline.total_us
    check_waits(schedule, timeline)
    assert timeline.total_us > MACHINE.roofline_us(problem, problem.gpus)


def test_a_tile_whose_weights_were_all_there_still_takes_time():
    """Its wave is a partial one, and the ring holds more than its tiles need."""
    problem = Problem(m=81, k=520, h=1416, n=1416, gpus=3, output="sharded")
    small = Tile(m=16, n=64, split_k=2)
    config = Config(up=small, down=small, stages=21, d_slabs=2, stage_split=(1, 2), mix=0.0)
    for tile in run(build(problem, replace(config, direct=True)), MACHINE).tiles:
        assert tile.start_us < tile.end_us


def check_waits(schedule: Schedule, timeline: Timeline) -> None:
    """No part of a sum began before its segment was there: what follows it fits into the tile."""
    computed = np.zeros((schedule.panels, len(schedule.segments)))
    starts = [segment.start for segment in schedule.segments]
    for tile in timeline.tiles:
        if tile.layer == UP:
            at = tile.row // schedule.config.up.m, bisect_right(starts, tile.col) - 1
            computed[at] = max(computed[at], tile.end_us)
    parts = gpu_parts(schedule.problem, schedule.config, MACHINE)
    for tile in timeline.tiles:
        if tile.layer == UP:
            continue
        down = parts[tile.gpu][DOWN]
        whole_us = left_us = min(down.tile_us, down.time.us(down.work.tiles % down.work.ctas))
        own = schedule.columns[UP][tile.gpu]
        first = schedule.segments.index(own) if own.width else 0
        spare_us = len(schedule.segments) * down.time.ahead_us(down.work.active) + 1e-6
        assert tile.end_us - tile.start_us >= left_us - spare_us
        for segment in schedule.awaits(DOWN, first):
            part = schedule.segments[segment]
            flag_us = 0.0 if part == own else MACHINE.flag_us
            ready_us = max(computed[p, segment] for p in schedule.panels_of(tile.row)) + flag_us
            assert tile.end_us >= ready_us + left_us - spare_us
            left_us -= whole_us * part.width / schedule.problem.h
        assert left_us == pytest.approx(0.0, abs=1e-6)


def check_coverage(timeline: Timeline, schedule: Schedule) -> None:
    """Each CTA ran its share of the list in order, one tile at a time."""
    by_cta: dict[tuple[int, int], list[TileSpan]] = {}
    for tile in timeline.tiles:
        by_cta.setdefault((tile.gpu, tile.cta), []).append(tile)
    ctas = resident_ctas(schedule.config, MACHINE.platform.sm_count)
    for (gpu, cta), spans in by_cta.items():
        slots = schedule.slots(gpu)[cta::ctas].tolist()
        wanted = [(layer, row, col) for layer, row, _, col, *_ in slots if layer != NOTHING]
        assert [(t.layer, t.row, t.col) for t in spans] == wanted
        assert all(a.end_us <= b.start_us for a, b in pairwise(spans))
    slots = [schedule.slots(gpu)[:, 0] for gpu in range(schedule.problem.gpus)]
    assert len(timeline.tiles) == sum(int((layers != NOTHING).sum()) for layers in slots)


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
    with pytest.raises(ScheduleError, match="panel 0, segment 0 for ever, target 2, value 1"):
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
    assert MACHINE.roofline_us(problem, 8) < eight < four
