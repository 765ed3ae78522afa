"""A sign of life: after two seconds a terminal shows what is being done, and for how long.

The line is on standard error, is updated in place and disappears at the end. Nothing is written
where standard error is no terminal: in a notebook, a file, a pipe, or under pytest.
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
class Work:
    """One piece of work, such as `planning loss`; `progress` says how far it is."""

    title: str
    progress: str = ""

    def __str__(self) -> str:
        return f"{self.title}: {self.progress}" if self.progress else self.title


# The work of the present thread that is shown, the outermost first.
_SHOWN: contextvars.ContextVar[list[Work] | None] = contextvars.ContextVar("shown", default=None)


@contextlib.contextmanager
def working(title: str) -> Generator[None]:
    """Show `title` in a terminal while the body runs, from its third second on.

    Work within other work of the same thread stands behind it on the same line.
    """
    outer = _SHOWN.get()
    if outer is None and not _is_terminal():
        yield
        return
    work, shown = Work(title), [] if outer is None else outer
    shown.append(work)
    before = _SHOWN.set(shown)
    try:
        with _Ticker(shown) if outer is None else contextlib.nullcontext():
            yield
    finally:
        _SHOWN.reset(before)
        shown.remove(work)


def progress(text: str) -> None:
    """Say how far the innermost work of this thread is."""
    if shown := _SHOWN.get():
        shown[-1].progress = text


def _is_terminal() -> bool:
    """Whether standard error is a terminal that can erase a line."""
    # What replaces standard error, in a notebook or beside a progress bar, prints whole lines.
    err, kind = sys.stderr, os.environ.get("TERM")
    return isinstance(err, io.TextIOWrapper) and err.isatty() and kind not in ("dumb", "unknown")


class _Ticker:
    """A thread that shows some work until the body ends, however it ends."""

    # The ticker that has the terminal's line: of several threads, the first that needs it.
    _lock, _owner = threading.Lock(), None

    def __init__(self, shown: list[Work]) -> None:
        self._shown, self._start = shown, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xform-alive", daemon=True)

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
        """Show a text in place of the one before; an empty one leaves the line to others."""
        with _Ticker._lock:
            mine = _Ticker._owner is self
            if mine or (text and _Ticker._owner is None):
                _Ticker._owner = self if text else None
                # The terminal may have gone, or standard error may have been closed.
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(_ERASE + text)
                    sys.stderr.flush()
