"""From everything that was measured to a model file that says how wrong it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctatune import accuracy, fit
from ctatune.accuracy import Accuracy, Regret
from ctatune.errors import UsageError
from ctatune.fit import Point
from ctatune.jit import equal_kernels, equal_with_whole_tiles, present_kernels
from ctatune.machine_model import MachineModel, document, load, model_of
from ctatune.records import SCREENING, Platform, Regime
from ctatune.rows import Row
from ctatune.seed import shipped_rows
from ctatune.store import Store, default_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """A fitted model, its file, and its errors on the held-out points."""

    machine: MachineModel
    document: dict[str, Any]
    held: list[Point]
    held_out: dict[str, Accuracy]
    regrets: list[Regret]
    about: str


def refit(db: Path | None, platform: str | None, out: Path | None) -> Refit:
    """Fit the model of a platform to the shipped and the user's screenings on such GPUs.

    `out` is the file to write (None: nothing is written).

    Raises: UsageError when there is too little data, or no model to start from.
    """
    if out and (out.is_dir() or not out.parent.is_dir()):
        raise UsageError(f"{out} is no file, or its folder is not there")
    here = load(platform).platform
    before = document(here.name)
    points = fit.points([row for row in _rows(db) if _is_of(row, here)])
    train = [point for point in points if not fit.is_held_out(point.problem)]
    held = [point for point in points if fit.is_held_out(point.problem)]
    if not 0 < len(fit.ours(held)) < len(held):
        text = "of the held-out shapes, ours and baselines of this version are needed"
        raise UsageError(f"too little is measured: {text}")
    after = fit.written(before, fit.calibrated(train, before))
    machine = model_of(after)
    errors = accuracy.held_out(train, held, machine) | accuracy.outside(points, before)
    regrets = accuracy.regrets(held, machine)
    shapes = sorted({point.problem.shape for point in held})
    after["fit"] = {
        "protocol": SCREENING,
        "kernels": sorted(present_kernels() | equal_kernels() | equal_with_whole_tiles()),
        "sha256_of_points": accuracy.fingerprint(points),
        "points": len(train),
        "shapes": len({point.problem.shape for point in train}),
        "held_out_shapes": shapes,
        "held_out": accuracy.document(errors),
        "regret": [regret._asdict() for regret in regrets],
    }
    if out:
        try:
            out.write_text(json.dumps(after, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {out}: {error.strerror}") from error
    about = (
        f"{machine.platform.name}: fitted to {len(train)} configs of {after['fit']['shapes']} "
        f"shapes; errors on {len(held)} configs of {len(shapes)} others, which no fit saw"
    )
    return Refit(
        machine=machine,
        document=after,
        held=held,
        held_out=errors,
        regrets=regrets,
        about=about,
    )


def _rows(db: Path | None) -> list[Row]:
    """All that is shipped, and what the user measured."""
    rows = shipped_rows()
    path = db or default_path()
    if path.exists():
        with Store.open(path, read_only=True) as store:
            rows += store.measurements()
    return rows


def _is_of(row: Row, machine: Platform) -> bool:
    """Whether a row was measured on such GPUs, linked alike where there are several, under the
    usual regime."""
    names = ("gpu", "sm_count", "power_limit_w")
    same = all(getattr(row.platform, name) == getattr(machine, name) for name in names)
    linked = row.problem.gpus == 1 or row.platform.link == machine.link
    return same and linked and row.measurement.regime == Regime()
