"""Signals that end a run: remembered until the step is done and saved."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Within, the first Ctrl-C, SIGTERM or SIGHUP is remembered and told; a second one acts.

    Attributes:
      signal: the number of the signal that came, or None.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        # One that is ignored, as SIGHUP under nohup, stays so.
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
            f"{signal.Signals(number).name}: stopping after this step, and saving;"
            " once more stops at once"
        )
