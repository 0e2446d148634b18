"""A search on a terminal: a bar with the best latency so far."""

from __future__ import annotations

from rich import progress
from rich.console import Console

from ctatune.problem import Problem
from ctatune.search import Step


class Progress:
    """A bar on stderr; plain lines where stderr is no terminal. Use as a context manager."""

    def __init__(self, problem: Problem) -> None:
        console = Console(stderr=True)
        self.trials = 0  # that were shown
        self._plain = not console.is_terminal
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[best]}"),
            console=console,
            disable=self._plain,
        )
        self._task = self._bar.add_task(problem.shape, total=None, best="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, step: Step) -> None:
        """Report one trial: on the bar, and as a line when it failed or there is no bar."""
        self.trials += 1
        best = f"best {step.best_us:.1f} us" if step.best_us is not None else ""
        self._bar.update(self._task, completed=step.done, total=step.goal, best=best)
        if self._plain or step.latency_us is None:
            value = f"{step.latency_us:.1f} us" if step.latency_us is not None else step.detail
            line = f"{step.done}/{step.goal} {step.config}: {value} ({best})"
            self._bar.console.print(line, highlight=False, soft_wrap=True, markup=False)
