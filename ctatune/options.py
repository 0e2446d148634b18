"""Options that several commands share, and what they are turned into."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import click

from ctatune.errors import UsageError
from ctatune.problem import ACTIVATIONS, DTYPES, OUTPUTS


def options(*options: Callable) -> Callable:
    def apply(function: Callable) -> Callable:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


TRIALS_HELP = "Configs a shape, counting those that the database holds."
SHAPE_HELP = "MxKxHxN, or MxKxH for N = K."
SHAPES_HELP = f"{SHAPE_HELP} May be repeated."
gpus_option = click.option("--gpus", type=int, required=True, help="Number of GPUs to use.")
problem_options = options(
    gpus_option,
    click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True),
    click.option("--activation", type=click.Choice(ACTIVATIONS), default="none", show_default=True),
    click.option(
        "--output",
        type=click.Choice(OUTPUTS),
        default="replicated",
        show_default=True,
        help="Where Y2 must lie.",
    ),
)
db_option = click.option(
    "--db", type=click.Path(path_type=Path), help="Database file [$CTATUNE_DB]."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
common_options = options(
    db_option,
    click.option(
        "--platform", help="Another platform than this machine's; with it nothing is measured."
    ),
    json_option,
)


def command_line() -> str:
    return "ctatune " + shlex.join(sys.argv[1:])


def seconds_of(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", text)
    if not found:
        raise UsageError(f"a time is a number with s, m or h, such as 10m; got {text!r}")
    seconds = float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]
    if seconds <= 0:
        raise UsageError(f"a time must be longer than nothing; got {text!r}")
    return seconds
