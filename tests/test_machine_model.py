"""The machine model: what it computes by hand, and what was measured of bursts and pacing."""

from dataclasses import replace

import pytest
from fakes import design_machine
from test_latency import config, square
from test_simulate import round_machine, times_of_gpu_0, tiny

from ctatune.config import Config, Tile
from ctatune.errors import UsageError
from ctatune.latency import estimate
from ctatune.machine_model import Work, faded, load, wgmma_rows
from ctatune.problem import Problem
from ctatune.schedule import UP, build
from ctatune.simulate import run, simulate

MACHINE = design_machine()


@pytest.mark.parametrize(
    ("m", "n", "rows"), [(128, 256, 640), (256, 128, 768), (128, 128, 384), (64, 128, 256)]
)
def test_wgmma_rows(m: int, n: int, rows: int) -> None:
    """Two groups of 64x256, two of 128x128 (two WGMMAs each), two of 64x128, two of 64x64."""
    assert wgmma_rows(Tile(m=m, n=n)) == rows


def test_hbm_traffic_known_values() -> None:
    """With 4 tile rows and 16 tile columns all in flight, every operand is read once."""
    tile = Tile(m=128, n=256)
    work = Work(m=512, inputs=8192, columns=4096, tile=tile, ctas=132)
    assert MACHINE.hbm_bytes(work) == 2 * 8192 * (512 + 4096)
    in_groups = Work(m=4096, inputs=8192, columns=8192, tile=replace(tile, group_m=32), ctas=32)
    assert MACHINE.hbm_bytes(in_groups) == 2 * 8192 * (32 * 4096 + 8192)
    one_row_waves = Work(m=2048, inputs=8192, columns=132 * 256, tile=tile, ctas=132)
    assert MACHINE.hbm_bytes(one_row_waves) == 2 * 8192 * (2048 + 16 * 132 * 256)


def test_load_knows_the_shipped_platform() -> None:
    assert load("nvidia-h200-nv18") == load()
    assert (MACHINE.platform.gpus, MACHINE.platform.sm_count) == (2, 132)
    with pytest.raises(UsageError, match=r"no model of platform 'tpu', only of nvidia-h200-nv18"):
        load("tpu")


def test_more_gpus_than_were_measured_are_like_those_that_were() -> None:
    assert MACHINE.for_gpus(1) is MACHINE.for_gpus(2) is MACHINE
    eight = MACHINE.for_gpus(8)
    assert (eight.platform.gpus, eight.platform.name) == (8, "nvidia-h200-nv18")
    assert replace(eight, platform=MACHINE.platform) == MACHINE


@pytest.mark.parametrize("name", ["link_gbps", "tensor_tflops", "launch_us"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_machine_model_refuses_nonsense(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        replace(MACHINE, **{name: value})


def test_a_machine_model_refuses_rates_above_the_peak() -> None:
    with pytest.raises(UsageError, match="must not exceed peak_hbm_gbps"):
        replace(MACHINE, hbm_gbps=5000.0)


def test_clock_droops_to_its_floor() -> None:
    assert MACHINE.clock(0.0) == 1.0
    assert MACHINE.clock(100.0) > MACHINE.clock(1000.0) > 1 - MACHINE.droop_fraction
    assert MACHINE.clock(1e9) == pytest.approx(1 - MACHINE.droop_fraction)


def test_burst_loss_known_values() -> None:
    """132 tiles of 64 KB take 23.5 us at 368 GB/s: 17.6 are lost, at half the pace half of it."""
    work = Work(m=4096, inputs=8192, columns=4096, tile=Tile(m=128, n=256), ctas=132)
    lost_us = [MACHINE.burst_loss_us(work, 1, pace_us, 100.0) for pace_us in (0.0, 2.94, 6.0)]
    assert lost_us == pytest.approx([17.63, 8.81, 1.76], abs=0.01)
    assert MACHINE.burst_loss_us(work, 0, 0.0, 100.0) == 0.0
    assert MACHINE.burst_loss_us(work, 7, 0.0, 100.0) == 75.0  # of a tile, not of the burst
    assert sum(faded(i) for i in range(1, 4)) == pytest.approx(faded(1, 3))
    assert faded(3, -1) == 0.0


def test_golden_paced_stores() -> None:
    """Each of two slabs 4 us after the other: the first CTA's tiles are away 5 us after their end,
    and the slabs are free for the next one only then. The peer's part is there at 22.5.
    """
    times_us = times_of_gpu_0(tiny("sharded", ctas=1, pace_us=4.0))
    assert times_us == pytest.approx([10, 12, 12, 17, 17, 27])


def test_ctas_take_turns_and_the_last_tile_of_each_is_not_paced() -> None:
    """Two CTAs with two tiles each; that of the second leaves half a pace after the first's."""
    paced = tiny("sharded", ctas=2, pace_us=8.0, mix=0.0)
    ends_us = [t.end_us for t in paced.tiles if t.gpu == 0]
    assert ends_us == pytest.approx([12, 12, 12 + 8 + 1, 12 + 8 + 4 + 1])
    assert paced.tiles[-1].start_us == pytest.approx(25 + 1 + 0.5)
    assert tiny("last", pace_us=8.0) == tiny("last")


def test_a_burst_costs_the_next_tile_time_and_fades() -> None:
    """Four CTAs store for 4 us together; a CTA's three `up` tiles take 9 us each, and more."""
    problem = Problem(m=128, k=512, h=3072, n=256, gpus=2, output="sharded")
    tile = Tile(m=128, n=128)
    config = Config(up=tile, down=tile, stages=2, d_slabs=2)
    machine = replace(round_machine(), burst_loss=0.75)
    for pace_us, lost_us in ((0.0, 3.0), (1.0, 1.5), (2.0, 0.3), (3.0, 0.3)):
        timeline = run(build(problem, replace(config, pace_us=pace_us)), machine)
        ups = [t for t in timeline.tiles if (t.gpu, t.cta, t.layer) == (0, 0, UP)]
        durations_us = [t.end_us - t.start_us for t in ups]
        assert durations_us == pytest.approx([9, 9 + lost_us, 9 + 0.55 * lost_us])


@pytest.mark.parametrize("predict", [estimate, simulate])
def test_pacing_saves_most_of_what_bursts_cost(predict) -> None:
    """Measured of the four bursts of `up`: 19 + 14 + 6 + 2, and with a pace of 6 us 3 + 1."""
    problem, paced = square(4096), replace(config(4096), pace_us=6.0)
    free_us = predict(problem, config(4096), replace(MACHINE, burst_loss=0.0)).latency_us
    assert predict(problem, config(4096), MACHINE).latency_us - free_us == pytest.approx(38, abs=6)
    assert predict(problem, paced, MACHINE).latency_us - free_us == pytest.approx(4, abs=2)


@pytest.mark.parametrize("predict", [estimate, simulate])
def test_bursts_of_y2_cost_too(predict) -> None:
    """One wave of `up`, then four of `down`: 17.6 us, and for Y2 0.55 + 0.3 + 0.17 times that."""
    lost_us: list[float] = []
    for output in ("sharded", "replicated"):
        problem = replace(square(2048, output, h=4096), n=16384)
        free_us = predict(problem, config(2048), replace(MACHINE, burst_loss=0.0)).latency_us
        lost_us.append(predict(problem, config(2048), MACHINE).latency_us - free_us)
    assert lost_us == pytest.approx([17, 35], abs=5)


@pytest.mark.parametrize(
    ("pace_us", "measured_us"), [(0.0, (99, 118, 113, 105, 101)), (6.0, (99, 102, 100))]
)
def test_tiles_after_a_burst_take_what_they_took(pace_us: float, measured_us) -> None:
    """Session of 2026-11-30, 4096x8192x8192 on two GPUs: four waves of `up`, then `down`. The last
    two of the unpaced ones are 99 us and what they were said to lose.
    """
    timeline = run(build(square(4096), replace(config(4096), pace_us=pace_us)), MACHINE)
    spans = [t for t in timeline.tiles if (t.gpu, t.cta) == (0, 0)]
    durations_us = [t.end_us - t.start_us for t in spans[: len(measured_us)]]
    assert durations_us == pytest.approx(measured_us, abs=6)
    assert sum(durations_us) == pytest.approx(sum(measured_us), rel=0.02)
