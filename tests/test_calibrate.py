"""The plan of a calibration, and that it goes on where it was stopped."""

from functools import partial

import pytest
from click.testing import CliRunner
from fakes import FakeBench

from ctatune import calibrate, jit, session
from ctatune.cli import main
from ctatune.config import AnyConfig, Baseline, Config
from ctatune.errors import DeviceError
from ctatune.fit import is_held_out, points
from ctatune.limits import why_invalid
from ctatune.machine_model import family
from ctatune.problem import Problem
from ctatune.search import Step
from ctatune.store import Store
from ctatune.worker import Worker


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_plan_is_valid_mixed_and_the_same_each_day(gpus):
    problems = calibrate.problems(gpus)
    assert problems == calibrate.problems(gpus)
    assert len(set(problems)) >= 40
    assert 0.15 < sum(map(is_held_out, problems)) / len(problems) < 0.4
    total = 0
    for problem in problems[:6]:
        plan = calibrate.plan(problem)
        ours = [config for config in plan if isinstance(config, Config)]
        assert plan == calibrate.plan(problem)
        assert len(set(plan)) == len(plan)
        assert len({family(config) for config in ours}) >= 2
        assert not any(why_invalid(config, problem) for config in ours)
        assert Baseline(method="single") in plan
        total += len(ours)
    assert total * len(problems) / 6 >= 600


@pytest.fixture
def compiled(monkeypatch):
    """What would be compiled together on a machine of two GPUs, whose bench is a fake."""
    found: list[AnyConfig] = []
    monkeypatch.setattr(session, "gpu_count", lambda: 2)
    monkeypatch.setattr(session, "Worker", lambda _: Worker(2, partial(FakeBench, "")))
    monkeypatch.setattr(jit, "compile_together", lambda configs, *_: found.extend(configs))
    return found


def test_what_a_search_tries_first_is_compiled_before(tmp_path, compiled):
    problem = Problem.of("200x4096x4096", gpus=2)
    steps: list[Step] = []
    with session.open_session(2, tmp_path / "x.db", None, "test") as opened:
        opened.search(problem, steps.append, trials=5)
        assert [step.config for step in steps] == compiled
        opened.search(problem, steps.append, trials=8)
    assert [step.config for step in steps] == compiled[:8]


def test_a_calibration_goes_on_and_its_screenings_can_be_fitted(tmp_path, monkeypatch, compiled):
    path = tmp_path / "x.db"
    monkeypatch.setattr(calibrate, "TOKENS", (4096,))
    monkeypatch.setattr(calibrate, "WEIGHTS", ((4096, 4096), (8192, 8192)))
    heard: list[int] = []

    def run() -> None:
        with session.open_session(2, path, None, "test") as opened:
            opened.calibrate(calibrate.problems(2), lambda _, timed: heard.append(timed), 60.0)

    run()
    assert heard == [len(calibrate.plan(problem)) for problem in calibrate.problems(2)]
    run()
    assert heard[2:] == [0, 0]
    with Store.open(path, read_only=True) as store:
        rows = store.measurements()
    assert len(rows) == sum(heard) == len(compiled)
    screened = points(rows)
    assert len(screened) == sum(heard) - 2  # rowsplit has no model


def test_a_plan_may_hold_much_of_a_space():
    problem = Problem.of("128x8192x8192", gpus=2)
    ours = [[c for c in calibrate.plan(problem, n) if isinstance(c, Config)] for n in (14, 300)]
    assert [len(some) for some in ours] == [14, 300]
    assert len(set(ours[1])) == 300
    assert ours[1][:14] == ours[0]


def test_shapes_that_are_named_are_measured_alone(tmp_path, compiled):
    found = CliRunner().invoke(
        main,
        [
            *("calibrate", "--gpus", "2", "--db", str(tmp_path / "x.db"), "--configs", "3"),
            *("--shape", "64x4096x4096", "--shape", "128x4096x4096", "--shape", "64x4096x4096"),
        ],
        catch_exceptions=False,
    )
    shapes = [line.split(":")[0] for line in found.stdout.splitlines()]
    assert shapes == ["64x4096x4096x4096", "128x4096x4096x4096"]
    assert sum(isinstance(config, Config) for config in compiled) == 6


def test_a_calibration_needs_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "gpu_count", lambda: 0)
    with (
        session.open_session(2, tmp_path / "x.db", None, "test") as opened,
        pytest.raises(DeviceError, match="a calibration needs GPUs"),
    ):
        opened.calibrate(calibrate.problems(2), lambda *_: None, 60.0)
