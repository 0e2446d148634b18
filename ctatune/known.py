"""What is known of a problem: the rows of the user and of the wheel that have its identity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ctatune import jit
from ctatune.config import OWN_KERNEL, AnyConfig, Config
from ctatune.errors import UsageError
from ctatune.machine_model import DEFAULT_PLATFORM, MachineModel, has_model, load
from ctatune.problem import Problem
from ctatune.records import Platform, Regime, protocol_of
from ctatune.rows import PredictionRow, Row
from ctatune.seed import shipped, shipped_shapes
from ctatune.store import Store, default_path

PLATFORM_COLUMNS = ("gpu", "link", "sm_count", "power_limit_w", "driver", "cuda")
LINK_COLUMNS = ("platform", "link")

Difference = tuple[str, Any, Any]  # name of a column, in the row, now


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRows:
    """What the user's database holds about weights, whatever the rest of their identity."""

    rows: tuple[Row, ...] = ()  # of the same weights and any number of tokens
    predictions: tuple[PredictionRow, ...] = ()
    platforms: tuple[Platform, ...] = ()  # with enough GPUs, the one that was used last first

    def of_tokens(self, m: int) -> tuple[Row, ...]:
        """The rows of as many tokens."""
        return tuple(row for row in self.rows if row.problem.m == m)


class Stored(NamedTuple):
    """The rows that could answer for a problem, and how many are of an older kernel or protocol."""

    rows: list[Row]
    outdated: int


def stored_rows(problem: Problem, db: Path | None, platform: str | None) -> Stored:
    """What is known of a problem: shipped rows, then the user's."""
    user, wanted = asked(problem, db, platform)
    rows = (*shipped(problem.shape), *user.of_tokens(problem.m))
    outdated = [row for row in rows if _outdated(row) and not _elsewhere(row, wanted)]
    return Stored(alike(rows, wanted), len(outdated))


def asked(
    problem: Problem, db: Path | None, platform: str | None
) -> tuple[UserRows, dict[str, Any]]:
    """What the user's database (None: `default_path()`) holds, and what must be equal in a row."""
    user = user_rows(db or default_path(), problem)
    return user, wanted_of(problem, _platform_of(problem, user, platform))


def _platform_of(problem: Problem, user: UserRows, name: str | None) -> dict[str, Any]:
    """The platform asked for, or the user's usual one: as it was when the user last measured the
    problem on it, else as it was for what is shipped of the problem, else when the user last
    measured anything on it, else as it is shipped."""
    name = name or _usual(problem, user)
    own = [row for row in user.rows if row.platform.name == name]
    exact = [row for row in own if row.problem == problem] or [
        row for row in shipped(problem.shape) if (row.problem, row.platform.name) == (problem, name)
    ]
    if rows := exact or own:
        return identity(max(rows, key=lambda row: row.age).platform)
    with suppress(UsageError):  # one that is neither measured nor shipped: the name will differ
        used = [platform for platform in user.platforms if platform.name == name]
        return identity(used[0] if used else load(name).platform)
    return {"platform": name}


def _usual(problem: Problem, user: UserRows) -> str:
    """The platform with enough GPUs that the user used last; of several one that can answer: on
    which the problem was measured, or with a model."""
    names = [platform.name for platform in user.platforms]
    measured = {row.platform.name for row in user.rows if row.problem == problem}
    able = [name for name in names if name in measured or has_model(name)]
    return next(iter(names if len(names) == 1 else able or names), DEFAULT_PLATFORM)


def model_for(problem: Problem, wanted: dict[str, Any]) -> tuple[MachineModel, str]:
    """The model of a platform, or the shipped one where GPU and link are the same; and a note of
    that. Raises: UsageError when there is neither."""
    try:
        return load(wanted["platform"]).for_gpus(problem.gpus), ""
    except UsageError:
        usual = load()
        names = ("gpu", "link") if problem.gpus > 1 else ("gpu",)
        if any(wanted.get(name) != getattr(usual.platform, name) for name in names):
            raise
        own = {name: wanted[name] for name in ("sm_count", "power_limit_w")}
        platform = replace(usual.platform, name=wanted["platform"], **own)
        note = f"with the rates of {usual.platform.name}: `ctatune fit` makes a model of this one"
        return replace(usual, platform=platform).for_gpus(problem.gpus), note


def identity(platform: Platform) -> dict[str, Any]:
    """What of a platform moves a latency."""
    return {"platform": platform.name} | {c: getattr(platform, c) for c in PLATFORM_COLUMNS}


def user_rows(path: Path, problem: Problem) -> UserRows:
    """What a database holds about the weights of a problem; no file is an empty one."""
    with suppress(PermissionError):  # the store says it better
        if not path.exists():
            return UserRows()
    sizes: dict[str, Any] = {name: getattr(problem, name) for name in "khn"}
    with Store.open(path, read_only=True) as store:
        return UserRows(
            rows=tuple(store.measurements(**sizes)),
            predictions=tuple(store.predictions(problem)),
            platforms=tuple(store.platforms(problem.gpus)),
        )


def wanted_of(problem: Problem, platform: dict[str, Any]) -> dict[str, Any]:
    """What must be equal in a row that answers for the problem, by the name of the column."""
    asked = {name: getattr(problem, name) for name in ("gpus", "dtype", "activation", "output")}
    return platform | asked | {"regime": str(Regime())}


def differences(row: Row, wanted: dict[str, Any]) -> list[str]:
    """What keeps a row from answering."""
    return [
        f"{name} differs (row {there}, now {now})"
        for name, there, now in _elsewhere(row, wanted) + _outdated(row)
    ]


def _elsewhere(row: Row, wanted: dict[str, Any]) -> list[Difference]:
    """Columns of another identity. Links, which name platforms too, mean nothing to one GPU, and
    differ anyway where the numbers of GPUs do."""
    have = wanted_of(row.problem, identity(row.platform))
    have["regime"] = str(row.measurement.regime)
    linked = have["gpus"] == wanted["gpus"] and (
        wanted["gpus"] > 1 or have["gpu"] != wanted.get("gpu")
    )
    names = [name for name in wanted if linked or name not in LINK_COLUMNS]
    return [(name, have[name], wanted[name]) for name in names if have[name] != wanted[name]]


def _outdated(row: Row) -> list[Difference]:
    """Columns of a version that does not count any more."""
    found: list[Difference] = []
    if not (row.of_this_protocol or row.of_older_race):
        found.append(("protocol", row.protocol, protocol_of(row.measurement.phase)))
    built = row.kernel_hash or row.measurement.outcome == "ok"  # else a failure of any version
    if row.config.method in OWN_KERNEL and built and not of_this_kernel(row):
        found.append(("kernel_hash", row.kernel_hash, jit.kernel_hash()))
    return found


def of_this_kernel(row: Row) -> bool:
    """Whether a row of our kernel is of the present version, or of an older one that counts."""
    return row.kernel_hash in jit.present_kernels() or _is_older_kernel(row)


def is_older(row: Row) -> bool:
    """Whether a row is of our kernel in an older version that counts, or of a race by a protocol
    that still counts."""
    return _is_older_kernel(row) or row.of_older_race


def _is_older_kernel(row: Row) -> bool:
    if row.config.method not in OWN_KERNEL:
        return False
    name = row.kernel_hash
    return name in jit.equal_kernels() or (
        name in jit.equal_with_whole_tiles() and has_whole_tiles(row.problem, row.config)
    )


def has_whole_tiles(problem: Problem, config: AnyConfig) -> bool:
    """Whether all tiles have as many rows. Of micro-batches it is known for powers of two."""
    m = problem.m
    if not isinstance(config, Config):
        return m & (m - 1) == 0
    return all(m <= tile.m or m % tile.m == 0 for tile in config.tiles)


def how_old(rows: Iterable[Row]) -> str:
    """What follows "measured": with which older kernel or protocols some were; else nothing."""
    rows = list(rows)
    kernel = "an older version of our kernel" if any(map(_is_older_kernel, rows)) else ""
    protocols = sorted({row.protocol for row in rows if row.of_older_race})
    old = " and ".join(filter(None, [kernel, *(f"protocol {number}" for number in protocols)]))
    return f" with {old}" if old else ""


def alike(rows: Sequence[Row], wanted: dict[str, Any]) -> list[Row]:
    """The rows of the identity that is wanted. What an older version of our kernel or of the
    protocol measured counts until the present one screened the same config, or raced any of ours.
    A wrong result of the present kernel counts while its protocol does."""
    found = [row for row in rows if not differences(row, wanted)]
    present = [row for row in found if not is_older(row)]
    screened = {
        (row.problem, row.config)
        for row in present
        if row.measurement.phase == "screen" and row.measurement.outcome != "throttled"
    }
    raced = {row.problem for row in present if row.is_final_of_ours}

    def is_past(row: Row) -> bool:
        proof = row.measurement.verification
        disproved = row.measurement.outcome == "wrong" and not (proof and proof.passed)
        if disproved and not _is_older_kernel(row):
            return False
        if row.measurement.phase == "screen":
            return (row.problem, row.config) in screened
        return row.problem in raced

    return [row for row in found if not (is_older(row) and is_past(row))]


def of_weights(problem: Problem, user: UserRows, wanted: dict[str, Any]) -> list[Row]:
    """Rows of the identity that is wanted with any number of tokens: the shipped ones where
    the user has no final of ours."""
    weights = problem.shape.partition("x")[2]
    same = (shape for shape in shipped_shapes() if shape.partition("x")[2] == weights)
    theirs = alike([row for shape in same for row in shipped(shape)], wanted)
    ours = alike(user.rows, wanted)
    own = {row.problem.m for row in ours if row.is_final_of_ours}
    return [*ours, *(row for row in theirs if row.problem.m not in own)]


def tokens_of_ours(problem: Problem, db: Path | None, platform: str | None) -> set[int]:
    """The numbers of tokens of which our kernel was measured, with these weights."""
    near = of_weights(problem, *asked(problem, db, platform))
    return {row.problem.m for row in near if row.good and row.config.method == "cta"}


def machine_of(problem: Problem, db: Path | None, platform: str | None) -> MachineModel:
    """The model that `best` computes with. Raises: UsageError when there is none."""
    _, wanted = asked(problem, db, platform)
    return model_for(problem, wanted)[0]
