"""A progress line: if work takes more than two seconds, a terminal shows its name and its duration.

The line goes to standard error, is updated in place and disappears at the end. Nothing is written
if standard error is not a terminal, as in a notebook, with a file or a pipe, or under pytest.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import io
import os
import sys
import threading
import time
from collections.abc import Generator

# When the line appears, and how often it is updated.
AFTER_SECONDS, EVERY_SECONDS = 2.0, 0.5
# Moves to the start of the line and erases it.
_ERASE = "\r\x1b[K"


@dataclasses.dataclass(eq=False)
class Task:
    """Some work: `title` is a text such as `planning loss`, `progress` such as `3 of 8`."""

    title: str
    progress: str = ""

    def __str__(self) -> str:
        return f"{self.title}: {self.progress}" if self.progress else self.title


# The tasks of the current thread that the line shows, the outermost first; None if there are none.
_SHOWN: contextvars.ContextVar[list[Task] | None] = contextvars.ContextVar("shown", default=None)


@contextlib.contextmanager
def show(title: str) -> Generator[None]:
    """Return a context that shows `title` in a terminal if its body runs for over two seconds.

    If the body shows another title, both are on the same line.
    """
    outer_tasks = _SHOWN.get()
    if outer_tasks is None and not _is_terminal():
        yield
        return
    task, tasks = Task(title), [] if outer_tasks is None else outer_tasks
    tasks.append(task)
    token = _SHOWN.set(tasks)
    try:
        with _LineWriter(tasks) if outer_tasks is None else contextlib.nullcontext():
            yield
    finally:
        _SHOWN.reset(token)
        tasks.remove(task)


def update(text: str) -> None:
    """Set the progress text of the current thread's innermost task; do nothing if it has none."""
    if tasks := _SHOWN.get():
        tasks[-1].progress = text


def _is_terminal() -> bool:
    """Return whether standard error is a terminal that can erase a line."""
    # Notebooks and progress bars replace standard error by objects that print whole lines only.
    err, kind = sys.stderr, os.environ.get("TERM")
    return isinstance(err, io.TextIOWrapper) and err.isatty() and kind not in ("dumb", "unknown")


class _LineWriter:
    """Context that updates the line in a thread of its own, until its body ends or fails."""

    # Each thread may have a writer. Only `_owner` writes: the first writer whose work has taken two
    # seconds.
    _lock, _owner = threading.Lock(), None

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks, self._start = tasks, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xform-progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        wait = AFTER_SECONDS
        while not self._ended.wait(wait):
            self._write(self._text())
            wait = EVERY_SECONDS
        self._write("")

    def _text(self) -> str:
        """Return the text of the line, cut to the width of the terminal."""
        seconds = f", {time.monotonic() - self._start:.0f} s"
        columns = 0
        with contextlib.suppress(OSError, ValueError):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
        text, room = "; ".join(map(str, tuple(self._tasks))), (columns or 80) - len(seconds) - 1
        return (text if len(text) <= room else text[: max(room - 3, 0)] + "...") + seconds

    def _write(self, text: str) -> None:
        """Replace the text of the line; an empty text releases the line for other threads."""
        with _LineWriter._lock:
            is_owner = _LineWriter._owner is self
            if is_owner or (text and _LineWriter._owner is None):
                _LineWriter._owner = self if text else None
                # The terminal may be gone, or standard error closed.
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(_ERASE + text)
                    sys.stderr.flush()
