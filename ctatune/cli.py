"""The commands: a thin skin over one call each. Results on stdout, logs on stderr.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no answer, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ctatune import __version__, data_commands
from ctatune.errors import CtatuneError, DeviceError, NoAnswer, UsageError
from ctatune.limits import why_invalid
from ctatune.options import (
    SHAPES_HELP,
    TRIALS_HELP,
    command_line,
    common_options,
    db_option,
    json_option,
    problem_options,
    seconds_of,
)
from ctatune.presets import PRESETS
from ctatune.problem import Problem
from ctatune.space import candidates, default_config

FAILED, NO_ANSWER, INTERRUPTED = 1, 3, 130
GO_ON = ("search", "bench", "calibrate")


class _Commands(click.Group):
    """Turns every error that ctatune raises on purpose into one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CtatuneError as error:
            message, code = str(error), error.exit_code
        except KeyboardInterrupt:
            message, code = "stopped", INTERRUPTED
            if ctx.invoked_subcommand in GO_ON:
                message += "; what was tried is stored, and the same command goes on"
        except BrokenPipeError:
            raise  # click ends quietly when nobody reads on
        except OSError as error:
            message, code = str(error), FAILED
        click.echo(f"ctatune: {message}", err=True)
        sys.exit(code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
@click.option("-v", "--verbose", is_flag=True, help="Say more on stderr.")
def main(verbose: bool) -> None:
    """Find and serve the fastest way to run an MLP on several NVIDIA GPUs of one machine."""
    level = logging.DEBUG if verbose else logging.WARNING
    logging.basicConfig(level=level, format="ctatune: %(message)s", stream=sys.stderr)


@main.command()
@db_option
@json_option
def doctor(db: Path | None, as_json: bool) -> None:
    """Say what this machine has and lacks; peer access is probed by real writes."""
    from ctatune.doctor import examine

    findings = examine(db)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        signs = {True: "ok     ", False: "FAULT  ", None: "absent "}
        for finding in findings:
            click.echo(f"{signs[finding.good]} {finding.what:10} {finding.detail}")
    if any(finding.good is False for finding in findings):
        sys.exit(FAILED)


@main.command()
@click.option("--shape", "shapes", multiple=True, required=True, help=SHAPES_HELP)
@click.option("--trials", type=click.IntRange(1), default=40, show_default=True, help=TRIALS_HELP)
@click.option(
    "--time",
    "time_text",
    help="Start no trial of a shape after this time (90s, 10m); the final follows.",
)
@problem_options
@common_options
def search(
    shapes: tuple[str, ...],
    trials: int,
    time_text: str | None,
    db: Path | None,
    platform: str | None,
    as_json: bool,
    **problem_fields: Any,
) -> None:
    """Measure configs and keep every latency; without a GPU, simulate and keep predictions."""
    from ctatune import session
    from ctatune.progress import Progress

    seconds = seconds_of(time_text) if time_text else None
    problems = _problems(shapes, problem_fields)
    _require_runnable(problems)
    choices = []
    with session.open_session(problems[0].gpus, db, platform, command_line()) as opened:
        if opened.simulates:
            click.echo(f"ctatune: {opened.note}", err=True)
        for problem in problems:
            with Progress(problem) as progress:
                choice = opened.search(problem, progress.show, trials=trials, seconds=seconds)
            if not progress.trials:
                click.echo(f"ctatune: {problem.shape}: no new config of ours was tried", err=True)
            if opened.simulates and choice.source in ("measured", "neighbour"):
                text = (
                    "measurements answer before simulations, those of other numbers of tokens too"
                )
                click.echo(f"ctatune: {text}", err=True)
            choices.append(choice)
            if not as_json:
                _print_choice(choice)
    if as_json:
        _print_json(choices)


@main.command()
@click.option("--shape", "shapes", multiple=True, required=True, help=SHAPES_HELP)
@click.option("--ours", is_flag=True, help="Of our kernel alone, which `ctatune.Mlp` runs.")
@problem_options
@common_options
def best(
    shapes: tuple[str, ...],
    ours: bool,
    db: Path | None,
    platform: str | None,
    as_json: bool,
    **problem_fields: Any,
) -> None:
    """Say which config to run, its latency, and where that number comes from."""
    from ctatune.answers import best as best_of

    asked = {"db": db, "platform": platform, "ours": ours} | problem_fields
    problems = _problems(shapes, problem_fields)
    choices = [best_of(problem.shape, **asked) for problem in problems]
    if db and not db.exists():
        click.echo(f"ctatune: {db} does not exist: what is shipped answers", err=True)
    if as_json:
        _print_json(choices)
    else:
        for choice in choices:
            _print_choice(choice)


@main.command()
@click.option("--shape", "shapes", multiple=True, help=SHAPES_HELP)
@click.option(
    "--preset", "presets", type=click.Choice(list(PRESETS)), multiple=True, help="Named shapes."
)
@click.option("--trials", type=click.IntRange(1), default=16, show_default=True, help=TRIALS_HELP)
@click.option("--stored", is_flag=True, help="Measure nothing: show the newest stored race.")
@click.option(
    "--plot", "plot_path", type=click.Path(path_type=Path), help="Image of latency over tokens."
)
@problem_options
@common_options
def bench(
    shapes: tuple[str, ...],
    presets: tuple[str, ...],
    trials: int,
    stored: bool,
    plot_path: Path | None,
    db: Path | None,
    platform: str | None,
    as_json: bool,
    **problem_fields: Any,
) -> None:
    """Race the best configs against every baseline, interleaved, and show the table."""
    from ctatune import race, session
    from ctatune.known import stored_rows
    from ctatune.progress import Progress

    named = [shape for preset in presets for shape in PRESETS[preset]]
    if not (shapes or named):
        raise UsageError("nothing to race: give --shape or --preset")
    problems = _problems((*shapes, *named), problem_fields)
    if plot_path:
        race.check_plot(plot_path)
    if not stored:
        with session.open_session(problems[0].gpus, db, platform, command_line()) as opened:
            if opened.simulates:
                raise DeviceError("a race needs GPUs; `--stored` shows the newest stored one")
            for problem in problems:
                with Progress(problem) as progress:
                    opened.search(problem, progress.show, trials=trials, race=True)
    known = {problem: stored_rows(problem, db, platform) for problem in problems}
    rows = {problem: found.rows for problem, found in known.items()}
    if stored:
        _say_what_is_left_out(known)
    races = {problem: race.compare(race.newest(rows[problem])) for problem in problems}
    if plot_path:
        race.plot(races, plot_path)
    if as_json:
        documents = {
            problem.shape: race.document(rows[problem], lines) for problem, lines in races.items()
        }
        click.echo(json.dumps(documents, indent=2))
    else:
        texts = [
            race.markdown(problem, race.shown(lines)) + race.control_line(rows[problem], lines)
            for problem, lines in races.items()
        ]
        click.echo("\n".join(texts), nl=False)
    if not any(races.values()):
        sys.exit(NO_ANSWER)


def _problems(shapes: Iterable[str], fields: dict[str, Any]) -> list[Problem]:
    """Each problem once."""
    return list(dict.fromkeys(Problem.of(shape, **fields) for shape in shapes))


def _require_runnable(problems: list[Problem]) -> None:
    """Raise NoAnswer for a problem that our kernel cannot run, before any work."""
    for problem in problems:
        if next(candidates(problem), None) is None:
            reason = why_invalid(default_config(problem), problem)
            raise NoAnswer(f"no config can run {problem.shape}: {reason}")


def _print_json(choices: list[Any]) -> None:
    """One document, or a list of several."""
    documents = [choice.to_json() for choice in choices]
    click.echo(json.dumps(documents[0] if len(documents) == 1 else documents, indent=2))


def _say_what_is_left_out(known: dict[Problem, Any]) -> None:
    for problem, found in known.items():
        if count := found.outdated:
            text = f"{problem.shape}: {count} rows of another kernel or protocol left out"
            click.echo(f"ctatune: {text}", err=True)


def _print_choice(choice: Any) -> None:
    where = f"{choice.output} on {choice.gpus} x {choice.platform}"
    click.echo(f"{choice.shape} {choice.dtype} {where}")
    click.echo(f"  {choice.config}")
    between = " ({:.1f} .. {:.1f})".format(*choice.interval_us) if choice.interval_us else ""
    click.echo(f"  {choice.latency_us:.1f} us{between}, {choice.source}")
    if known := choice.evidence:
        how = "raced" if known["phase"] == "final" else "screened"
        text = "{rounds} rounds, protocol {protocol}, {gpu} {power_limit_w} W, driver {driver}"
        click.echo(f"  {how} {str(known['utc'])[:10]}, {text.format(**known)}")
    for method, latency_us in choice.baselines.items():
        if method != choice.method:
            ratio = choice.latency_us / latency_us
            click.echo(f"  {method}: {latency_us:.1f} us; the answer is {ratio:.3f} of it")
    if choice.note:
        click.echo(f"  note: {choice.note}")


for command in data_commands.COMMANDS:
    main.add_command(command)


if __name__ == "__main__":
    main()
