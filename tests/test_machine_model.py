"""The machine model: what it computes by hand, and what was measured of bursts and pacing."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from fakes import cool_machine, design_machine
from test_latency import config, square
from test_simulate import round_machine, times_of_gpu_0, tiny

from ctatune import machine_model
from ctatune.config import Config, Tile
from ctatune.errors import UsageError
from ctatune.latency import estimate
from ctatune.machine_model import DEFAULT_PLATFORM, faded, load
from ctatune.problem import Problem
from ctatune.schedule import UP, build
from ctatune.simulate import run, simulate
from ctatune.work import Work

MACHINE = design_machine()
COOL = cool_machine()


def work(m: int, inputs: int, columns: int, **rest: Any) -> Work:
    tile = Tile(m=128, n=256, group_m=rest.pop("group_m", 1))
    return Work(
        m=m, inputs=inputs, columns=columns, tile=tile, **({"ctas": 132, "kept_bytes": 30e6} | rest)
    )


def test_hbm_traffic_known_values() -> None:
    """With 4 tile rows and 16 tile columns all in flight, every operand is read once; 63 of 64
    readers of the inputs and 3 of 4 of the weights need L2 for that.
    """
    assert work(512, 8192, 4096).hbm_bytes == (
        2 * 8192 * (512 + 4096),
        2 * 8192 * 4096 * 3,
    )
    once, _ = work(4096, 8192, 8192, group_m=32, ctas=32).hbm_bytes
    assert once == 2 * 8192 * (32 * 4096 + 8192)
    once, _ = work(2048, 8192, 132 * 256).hbm_bytes
    assert once == 2 * 8192 * (2048 + 16 * 132 * 256)


def test_tiles_take_what_the_whole_ones_take() -> None:
    assert [work(m, 64, 4096).input_rows for m in (100, 128, 200, 256)] == [100, 128, 128, 128]
    assert work(200, 64, 4096).loaded_bytes == work(256, 64, 4096).loaded_bytes


def test_ctas_that_drift_apart_read_again() -> None:
    """The more waves, the less of what L2 has merged and kept; one wave is nearly in step."""
    one, many = work(512, 8192, 8192), work(16384, 8192, 8192, group_m=4)
    assert MACHINE.in_step(one) > 0.9
    assert MACHINE.in_step(many) < 0.6
    assert MACHINE.l2_bytes(one) < one.loaded_bytes
    assert MACHINE.hbm_bytes(many) * many.tiles > many.hbm_bytes[0]


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


def test_the_power_limit_takes_clock() -> None:
    """600 W beside the 100 W that are always there are just what a GPU may have; eight times as
    much needs the clock that dynamic power falls by eight for."""
    machine = replace(MACHINE, static_w=100.0, power_exponent=3.0)
    assert machine.clock(0.0, 10.0) == machine.clock(300.0e6, 1.0) == 1.0
    assert machine.clock(600.0e6, 1.0) == pytest.approx(1.0)
    assert machine.clock(4800.0e6, 1.0) == pytest.approx(0.5)


def test_burst_loss_known_values() -> None:
    """132 tiles of 64 KB take 23.5 us at 368 GB/s: 17.6 are lost, at half the pace half of it."""
    part = work(4096, 8192, 4096)
    lost_us = [MACHINE.burst_loss_us(part, 1, pace_us, 100.0) for pace_us in (0.0, 2.94, 6.0)]
    assert lost_us == pytest.approx([17.63, 8.81, 1.76], abs=0.01)
    assert MACHINE.burst_loss_us(part, 0, 0.0, 100.0) == 0.0
    assert MACHINE.burst_loss_us(part, 7, 0.0, 100.0) == 75.0  # of a tile, not of the burst
    assert sum(faded(i) for i in range(1, 4)) == pytest.approx(faded(1, 3))
    assert faded(3, -1) == 0.0


def test_golden_paced_stores() -> None:
    """Each of two slabs 4 us after the other, once this GPU is told (0.5): the first CTA's tiles
    are away 5.5 us after their end, and the slabs are free for the next one only then; its stores
    wait for the flag before them.
    """
    times_us = times_of_gpu_0(tiny("sharded", ctas=1, pace_us=4.0))
    assert times_us == pytest.approx([10, 12, 12, 17.5, 18, 28.5])


def test_ctas_take_turns_and_the_last_tile_of_each_is_not_paced() -> None:
    """Two CTAs with two tiles each; that of the second leaves half a pace after the first's, and
    its next one when the flag of that has left."""
    paced = tiny("sharded", ctas=2, pace_us=8.0, mix=0.0)
    ends_us = [t.end_us for t in paced.tiles if t.gpu == 0]
    assert ends_us == pytest.approx([12, 12, 12.5 + 8 + 1, 12.5 + 8 + 4 + 1])
    assert paced.tiles[-1].start_us == pytest.approx(25.5 + 0.5 + 1 + 0.5)
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
    free_us = predict(problem, config(4096), replace(COOL, burst_loss=0.0)).latency_us
    assert predict(problem, config(4096), COOL).latency_us - free_us == pytest.approx(38, abs=6)
    assert predict(problem, paced, COOL).latency_us - free_us == pytest.approx(4, abs=2)


@pytest.mark.parametrize("predict", [estimate, simulate])
def test_bursts_of_y2_cost_too(predict) -> None:
    """One wave of `up`, then four of `down`: 17.6 us, and for Y2 0.55 + 0.3 + 0.17 times that."""
    lost_us: list[float] = []
    for output in ("sharded", "replicated"):
        problem = replace(square(2048, output, h=4096), n=16384)
        free_us = predict(problem, config(2048), replace(COOL, burst_loss=0.0)).latency_us
        lost_us.append(predict(problem, config(2048), COOL).latency_us - free_us)
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
    assert durations_us == pytest.approx(measured_us, abs=8)
    assert sum(durations_us) == pytest.approx(sum(measured_us), rel=0.06)


def test_what_a_tile_loads_is_what_there_is():
    """Rows that exist, lines that rows touch, weights that the ring holds."""
    one_token = work(1, 8192, 8192)
    assert one_token.input_rows == 1
    assert one_token.loaded_bytes == (1 + one_token.tile.n) * 8192 * 2
    assert work(128, 8200, 8192, dense=True).lines == 2 - 16 / 128
    assert work(128, 8192, 8192, dense=True).lines == work(128, 8200, 8192).lines == 1
    deep = work(1, 8192, 8192, stages=8)
    assert deep.ahead_bytes == 7 * one_token.tile.n * 128
    few, many = (MACHINE.tile_time(one_token).memory.us(active) for active in (8, 128))
    assert many > few > many * 8 / 128


def test_own_models_go_before_the_shipped_ones(tmp_path, monkeypatch):
    shipped = machine_model.document(DEFAULT_PLATFORM)
    own = copy.deepcopy(shipped)
    own["parameters"]["flag_us"]["value"] = 9.0
    for name in (DEFAULT_PLATFORM, "mine"):
        own["platform"]["name"] = name
        (tmp_path / f"{name}.json").write_text(json.dumps(own))
    caches = machine_model._documents, machine_model._model
    monkeypatch.setenv("CTATUNE_MODELS", str(tmp_path))
    try:
        for cached in caches:
            cached.cache_clear()
        assert [load(name).flag_us for name in (None, "mine")] == [9.0, 9.0]
        monkeypatch.delenv("CTATUNE_MODELS")
    finally:
        for cached in caches:
            cached.cache_clear()
    assert load().flag_us != 9.0
