"""Signals that end a run after the current step, with a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """A context that records the first Ctrl-C, SIGTERM or SIGHUP. A second one acts as usual.

    Attributes:
      signal: the number of the signal that was received, or None.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        # A signal that is ignored, such as SIGHUP under nohup, stays ignored.
        self._before = {s: h for s in SIGNALS if (h := signal.getsignal(s)) != signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        self.__exit__()
        self._say(
            f"{signal.Signals(number).name}: saving and stopping after this step;"
            " a second signal stops immediately"
        )
