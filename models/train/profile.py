"""Profiler traces of some steps, for XProf or Perfetto."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from models.errors import InputError


def steps_of(text: str) -> range:
    """Parse `--profile-steps START:STOP` to a range, which excludes STOP. "" is an empty range."""
    start, colon, stop = text.partition(":")
    if not text:
        return range(0)
    if not (colon and start.isdecimal() and stop.isdecimal() and 0 < int(start) < int(stop)):
        raise InputError(
            f"--profile-steps {text}: give two steps START:STOP, such as 10:13 for 10, 11 and 12"
        )
    return range(int(start), int(stop))


class Profiler:
    """Writes a trace of some steps to a folder, when the last of them is done."""

    def __init__(self, steps: range, folder: Path) -> None:
        self._steps, self._folder = steps, folder
        self._running = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Mark the work started inside this context as part of step `number`."""
        if number not in self._steps:
            yield
            return
        if not self._running:
            jax.profiler.start_trace(self._folder)
            self._running = True
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield

    def done(self, number: int, state: Any) -> None:
        """If this was the last step of the trace, wait for its state and write the trace."""
        if number + 1 == self._steps.stop:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Write the trace so far, if one has begun."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
