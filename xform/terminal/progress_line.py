"""A progress line for long work: after two seconds a terminal shows the work and its duration.

The line goes to standard error, is updated in place and disappears at the end. Nothing is written
if standard error is not a terminal: in a notebook, to a file or a pipe, or under pytest.
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

AFTER_SECONDS, EVERY_SECONDS = 2.0, 0.5
_ERASE = "\r\x1b[K"


@dataclasses.dataclass(eq=False)
class Task:
    """A task, such as `planning loss`; `progress` is a text such as `3 of 8`."""

    title: str
    progress: str = ""

    def __str__(self) -> str:
        return f"{self.title}: {self.progress}" if self.progress else self.title


# The current thread's work that is on the line, the outermost first.
_SHOWN: contextvars.ContextVar[list[Task] | None] = contextvars.ContextVar("shown", default=None)


@contextlib.contextmanager
def show(title: str) -> Generator[None]:
    """Show `title` in a terminal while the body runs, once it has taken two seconds.

    Nested work of the same thread is appended to the same line.
    """
    outer = _SHOWN.get()
    if outer is None and not _is_terminal():
        yield
        return
    work, shown = Task(title), [] if outer is None else outer
    shown.append(work)
    before = _SHOWN.set(shown)
    try:
        with _Ticker(shown) if outer is None else contextlib.nullcontext():
            yield
    finally:
        _SHOWN.reset(before)
        shown.remove(work)


def update(text: str) -> None:
    """Set the progress text of this thread's innermost work."""
    if shown := _SHOWN.get():
        shown[-1].progress = text


def _is_terminal() -> bool:
    """Whether standard error is a terminal that can erase a line."""
    # Notebooks and progress bars replace standard error by objects that print whole lines only.
    err, kind = sys.stderr, os.environ.get("TERM")
    return isinstance(err, io.TextIOWrapper) and err.isatty() and kind not in ("dumb", "unknown")


class _Ticker:
    """A thread that updates the line until the body ends, with or without an error."""

    # Only one ticker writes at a time: the first whose work has taken two seconds.
    _lock, _owner = threading.Lock(), None

    def __init__(self, shown: list[Task]) -> None:
        self._shown, self._start = shown, time.monotonic()
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
        seconds = f", {time.monotonic() - self._start:.0f} s"
        columns = 0
        with contextlib.suppress(OSError, ValueError):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
        text, room = "; ".join(map(str, tuple(self._shown))), (columns or 80) - len(seconds) - 1
        return (text if len(text) <= room else text[: max(room - 3, 0)] + "...") + seconds

    def _write(self, text: str) -> None:
        """Replace the text of the line; an empty text releases the line for other threads."""
        with _Ticker._lock:
            mine = _Ticker._owner is self
            if mine or (text and _Ticker._owner is None):
                _Ticker._owner = self if text else None
                # The terminal may be gone, or standard error closed.
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(_ERASE + text)
                    sys.stderr.flush()
