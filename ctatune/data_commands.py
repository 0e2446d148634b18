"""The commands about data and models: `calibrate`, `fit`, `export`, `merge`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ctatune.errors import StoreError, UsageError
from ctatune.options import (
    SHAPE_HELP,
    command_line,
    common_options,
    db_option,
    gpus_option,
    seconds_of,
)
from ctatune.problem import Problem


@click.command()
@gpus_option
@click.option("--shape", "shapes", multiple=True, help=f"{SHAPE_HELP} Instead of sixty shapes.")
@click.option(
    "--configs", type=click.IntRange(1), help="Of ours, of each shape (a few if not given)."
)
@click.option("--time", "time_text", default="10m", show_default=True, help="Start none after it.")
@db_option
def calibrate(
    gpus: int, shapes: tuple[str, ...], configs: int | None, time_text: str, db: Path | None
) -> None:
    """Screen configs of many shapes, for `fit`; the same command goes on."""
    from ctatune import calibrate, session

    problems = [Problem.of(shape, gpus=gpus) for shape in dict.fromkeys(shapes)]

    def show(problem: Problem, timed: int) -> None:
        click.echo(f"{problem.shape}: {timed} configs timed")

    with session.open_session(gpus, db, None, command_line()) as opened:
        asked = problems or calibrate.problems(gpus)
        opened.calibrate(asked, show, seconds_of(time_text), configs)


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write the fitted model to this file, such as one of `models/`.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    help="Image of estimated over measured latency of the shapes that no fit saw.",
)
@common_options
def fit(
    out: Path | None,
    plot_path: Path | None,
    db: Path | None,
    platform: str | None,
    as_json: bool,
) -> None:
    """Fit the latency models to all screenings that are known, and say how wrong they are on
    shapes that no fit saw."""
    from ctatune import accuracy, race, refit

    if plot_path:
        race.check_plot(plot_path)
    click.echo("ctatune: this takes some two minutes", err=True)
    fitted = refit.refit(db, platform, out)
    if plot_path:
        accuracy.plot(fitted.held, fitted.machine, plot_path)
    if as_json:
        click.echo(json.dumps(fitted.document["fit"], indent=2))
        return
    click.echo(f"{fitted.about}\n")
    click.echo(f"{accuracy.table(fitted.held_out)}\n")
    if fitted.regrets:
        click.echo(f"{accuracy.regret_table(fitted.regrets)}\n")
    click.echo(accuracy.groups(fitted.held, fitted.machine))


@click.command()
@common_options
def export(db: Path | None, platform: str | None, as_json: bool) -> None:
    """Print every measurement as a JSON line, sorted: what `db/measurements` ships."""
    from ctatune.seed import export_lines
    from ctatune.store import Store, default_path

    with Store.open(db or default_path(), read_only=True) as store:
        lines = list(export_lines(store, platform=platform))
    if as_json:
        click.echo("[" + ",\n".join(lines) + "]")
    elif lines:
        click.echo("\n".join(lines))


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@db_option
def merge(files: tuple[Path, ...], db: Path | None) -> None:
    """Add exported JSON lines to your database; rows that it has are not added twice."""
    from ctatune.seed import import_lines
    from ctatune.store import Store, default_path

    useless = []
    with Store.open(db or default_path()) as store:
        for path in files:
            try:
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}") from error
            if lines and lines[0].startswith("["):  # `export --json`: a line each, and commas
                lines = [line.strip("[],") for line in lines]
            done = import_lines(store, lines, origin=str(path))
            click.echo(f"{path}: {done.added} added, {done.known} known, {done.damaged} damaged")
            if done.damaged and not (done.added or done.known):
                useless.append(str(path))
    if useless:
        raise StoreError(f"no line of {', '.join(useless)} is a measurement")


COMMANDS = (calibrate, fit, export, merge)
