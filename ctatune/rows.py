"""What a stored row is, and its forms: columns of SQLite, a document of JSON, typed values."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ctatune.config import AnyConfig, parse_config
from ctatune.layout import pitch
from ctatune.problem import Problem
from ctatune.records import (
    DENSE,
    OLDER_RACING,
    Measurement,
    Platform,
    Prediction,
    protocol_of,
)

_log = logging.getLogger(__name__)

# What a damaged line, or a damaged row of a database, raises when it is decoded.
DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_JSON_COLUMNS = ("versions", "samples_us", "gpu_state")
_OTHER_TABLES = ("kernel", "verification")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One start of a command that measures or simulates, on one platform."""

    id: int
    utc: str
    command: str
    compiler: str
    versions: dict[str, str]
    platform: Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A stored measurement with its full identity; `trial` counts from 1 inside its run."""

    id: int
    trial: int
    utc: str
    protocol: int
    run: Run
    problem: Problem
    config: AnyConfig
    measurement: Measurement

    @property
    def platform(self) -> Platform:
        return self.run.platform

    @property
    def run_id(self) -> int:
        return self.run.id

    @property
    def kernel_hash(self) -> str | None:
        """The version of our kernel: of what was built, else (a failure) of the run."""
        built = self.measurement.kernel
        return built.hash if built else self.run.versions.get("kernel")

    @property
    def good(self) -> bool:
        """Whether it holds latencies of a verified run of outcome ok."""
        proof = self.measurement.verification
        return self.measurement.timed and proof is not None and proof.passed

    @property
    def of_this_protocol(self) -> bool:
        """Whether it was measured as such rows are now."""
        phase = self.measurement.phase
        same = self.protocol == DENSE and phase == "screen" and self._lies_as_now
        return self.protocol == protocol_of(phase) or same

    @property
    def of_older_race(self) -> bool:
        """Whether it is of a race by an older protocol that still counts."""
        raced = self.measurement.phase != "screen" and self.protocol in OLDER_RACING
        return raced and (self.protocol > DENSE or self._lies_as_now)

    @property
    def _lies_as_now(self) -> bool:
        """Whether dense rows of its matrices begin with cache lines, as they all do now."""
        return all(pitch(columns) == columns for columns in (self.problem.k, self.problem.h))

    @property
    def is_final_of_ours(self) -> bool:
        """Whether it is a good row of our kernel in a race."""
        return self.good and self.measurement.phase == "final" and self.config.method == "cta"

    @property
    def age(self) -> tuple[str, int, int]:
        """Sorts rows by when they were measured: rows of an older file may be stored later."""
        return self.run.utc, self.run.id, self.trial


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRow:
    """A stored prediction: another type than `Row`, so that neither passes for the other."""

    id: int
    utc: str
    run: Run
    problem: Problem
    config: AnyConfig
    prediction: Prediction

    @property
    def good(self) -> bool:
        """Whether its latency can be one."""
        return 0.0 < self.prediction.latency_us < math.inf


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces, in one line of ASCII; nan becomes null, inf a string."""
    return json.dumps(_finite(value), sort_keys=True, separators=(",", ":"))


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def decode(hint: Any, value: Any) -> Any:
    """`value`, as JSON or SQLite holds it, as the type `hint`: the inverse of `asdict`.

    Raises: one of DAMAGE when something is missing, unknown or of the wrong type.
    """
    if type(value) is hint:
        return value
    if hint == AnyConfig:
        return parse_config(value if isinstance(value, str) else json.dumps(value))
    if get_origin(hint) is UnionType:  # T | None
        return None if value is None else decode(get_args(hint)[0], value)
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if kinds[-1] is ...:
            return tuple(decode(kinds[0], part) for part in value)
        return tuple(decode(kind, part) for kind, part in zip(kinds, value, strict=True))
    if is_dataclass(hint):
        hints = _hints(hint)
        return hint(**{name: decode(hints[name], part) for name, part in value.items()})  # type: ignore
    return _decode_plain(hint, value)


def _decode_plain(hint: Any, value: Any) -> Any:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"must be one of {get_args(hint)}, got {value!r}")
        return value
    if hint is float:  # null is nan, as neither SQLite nor JSON has one
        return math.nan if value is None else float(value)
    if hint is bool and value in (0, 1):  # SQLite has no bool
        return bool(value)
    kind = get_origin(hint) or hint
    if type(value) is not kind:
        raise TypeError(f"must be {kind.__name__}, got {value!r}")
    return value


def columns(value: Measurement | Prediction) -> dict[str, Any]:
    """The columns of a table that hold `value` itself; lists and maps are JSON text."""
    row = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in _OTHER_TABLES}
    row["low_us"], row["high_us"] = row.pop("interval_us") or (None, None)
    if isinstance(value, Measurement):
        row |= asdict(row.pop("regime"))
        row["detail"] = value.detail.encode(errors="replace").decode()
        row["samples_us"] = canonical_json(value.samples_us)
        row["gpu_state"] = canonical_json(value.gpu_state)
    return row


def document(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a view as `asdict` writes it: column "a.b" is field b of field a."""
    whole: dict[str, Any] = {}
    for name, value in row.items():
        *outer, last = name.split(".")
        part = whole
        for field in outer:
            part = part.setdefault(field, {})
        part[last] = json.loads(value) if last in _JSON_COLUMNS else value
    timed = whole.get("measurement") or whole["prediction"]
    low_us, high_us = timed.pop("low_us"), timed.pop("high_us")
    timed["interval_us"] = None if low_us is None else (low_us, high_us)
    for name in _OTHER_TABLES:
        if set(timed.get(name, {}).values()) == {None}:  # the outer join found none
            timed[name] = None
    return whole


@cache
def warn_once(message: str) -> None:
    """Report a damage, once in a process."""
    _log.warning("%s", message)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
