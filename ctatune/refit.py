"""From everything that was measured to a model file that says how wrong it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctatune import accuracy, fit
from ctatune.errors import UsageError
from ctatune.fit import Accuracy, Point
from ctatune.jit import kernel_hash
from ctatune.machine_model import MachineModel, file_of, load, model_of
from ctatune.records import PROTOCOL
from ctatune.rows import Row
from ctatune.seed import shipped, shipped_shapes
from ctatune.store import Store, default_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """A fitted model, its file, and its errors on the held-out points."""

    machine: MachineModel
    document: dict[str, Any]
    held: list[Point]
    held_out: dict[str, Accuracy]
    about: str


def refit(db: Path | None, platform: str | None, out: Path | None) -> Refit:
    """Fit the model of a platform to the shipped and the user's races on such GPUs.

    `out` is the file to write (None: nothing is written).

    Raises: UsageError when there is too little data, or no model to start from.
    """
    start = load(platform)
    before = json.loads(file_of(start.platform.name).read_text(encoding="utf-8"))
    points = fit.points(row for row in _rows(db) if row.platform.gpu == start.platform.gpu)
    train = [point for point in points if not fit.is_held_out(point.problem)]
    held = [point for point in points if fit.is_held_out(point.problem)]
    if not fit.ours(held):
        raise UsageError("no shape that was measured is held out: measure more shapes")
    document = fit.written(before, fit.calibrated(train, start, before))
    machine = model_of(document)
    errors = accuracy.held_out(train, held, machine)
    shapes = sorted({point.problem.shape for point in held})
    document["fit"] = {
        "protocol": PROTOCOL,
        "kernel_hash": kernel_hash(),
        "sha256_of_points": accuracy.fingerprint(points),
        "points": len(train),
        "shapes": len({point.problem.shape for point in train}),
        "held_out_shapes": shapes,
        "held_out": accuracy.document(errors),
    }
    if out:
        out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    about = (
        f"{start.platform.name}: fitted to {len(train)} configs of {document['fit']['shapes']} "
        f"shapes; errors on {len(held)} configs of {len(shapes)} others, which no fit saw"
    )
    return Refit(machine=machine, document=document, held=held, held_out=errors, about=about)


def _rows(db: Path | None) -> list[Row]:
    """All that is shipped, and what the user measured."""
    rows = [row for shape in shipped_shapes() for row in shipped(shape)]
    path = db or default_path()
    if path.exists():
        with Store.open(path, read_only=True) as store:
            rows += store.measurements()
    return rows
