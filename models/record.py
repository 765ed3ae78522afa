"""What a run reports: a line of JSON for every step, and progress for whoever watches."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from models.errors import InputError

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """The records of a log, oldest first; a last line that was cut off is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


class Log:
    """A JSON-lines file with `step` in each record, cut back to the step from which a run goes on.

    Floats are written so that reading them gives the same bits.
    """

    def __init__(self, path: Path, *, after: int) -> None:
        kept = [r for r in read_records(path) if r["step"] <= after]
        partial = path.with_suffix(".partial")
        with self._writing(path):
            partial.write_text("".join(json.dumps(r) + "\n" for r in kept))
            os.replace(partial, path)
            self._file = path.open("a")
        self.path = path

    @staticmethod
    @contextlib.contextmanager
    def _writing(path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error

    def write(self, **record: Any) -> None:
        """Append one record; it is in the file when this returns."""
        with self._writing(self.path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with self._writing(self.path):
            self._file.close()


class Display:
    """A progress bar on a terminal; elsewhere a plain line every `every` steps."""

    def __init__(self, console: Console, *, first: int, total: int, every: int) -> None:
        self.console = console
        self.total = total
        self.every = every
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
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, step: int, loss: float, seconds: float, tokens_per_second: float) -> None:
        """Show step number `step`: loss in nats per token, seconds per step, and speed."""
        numbers = (
            f"loss {loss:.3f} ({loss / math.log(2):.2f} bits)  "
            f"{tokens_per_second:,.0f} tokens/s  {seconds * 1e3:.0f} ms/step"
        )
        self._bar.update(self._task, completed=step, numbers=numbers)
        if not self.console.is_terminal and (step % self.every == 0 or step == self.total):
            left = (self.total - step) * seconds
            self.console.print(f"step {step}/{self.total}  {numbers}  {left:.0f} s left")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, highlight=False)
