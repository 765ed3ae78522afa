"""The progress of a run on standard output. A failed write does not interrupt a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Output(Console):
    """Standard output without markup, on which a closed pipe raises an `OSError`."""

    def __init__(self, **options: Any) -> None:
        if not {"file", "force_terminal"} & options.keys() and not sys.stdout.isatty():
            # Jupyter sets FORCE_COLOR, which Rich takes for a terminal, where it moves a bar.
            options["force_terminal"] = False
        super().__init__(markup=False, highlight=False, soft_wrap=True, **options)

    def on_broken_pipe(self) -> NoReturn:
        """Raise an error. Rich would end the program."""
        raise BrokenPipeError(None, "Broken pipe")


class Display:
    """A progress bar on a terminal, or otherwise a plain line every `every` steps.

    Attributes:
      failure: the reason of the first failed write, after which nothing is shown; None so far.
    """

    def __init__(self, console: Console, *, first: int, total: int, every: int) -> None:
        self.console = console
        self.total = total
        self.every = every
        self.failure: str | None = None
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=first, numbers="compiling")

    def __enter__(self) -> Display:
        self._try(self._bar.start)
        return self

    def __exit__(self, *_: object) -> None:
        self._try(self._bar.stop)

    def update(self, step: int, metrics: str, seconds: float, rate: str, mfu: float | None = None
               ) -> None:  # fmt: skip
        """Show a step: its metrics as text, seconds per step, throughput and utilization."""
        numbers = f"{metrics}  {rate}  {seconds * 1e3:.0f} ms/step"
        numbers += "" if mfu is None else f"  MFU {mfu:.1%}"
        self._try(lambda: self._bar.update(self._task, completed=step, numbers=numbers))
        if not self.console.is_terminal and (step % self.every == 0 or step == self.total):
            left = (self.total - step) * seconds
            self.say(f"step {step}/{self.total}  {numbers}  {left:.0f} s left")

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._try(lambda: self.console.print(text))

    def _try(self, show: Callable[[], object]) -> None:
        if self.failure is None:
            try:
                show()
            except OSError as error:
                self.failure = error.strerror or type(error).__name__
