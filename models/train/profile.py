"""Traces of some steps for a profiler, such as XProf or Perfetto."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from models.errors import InputError


def steps_of(text: str) -> range:
    """The steps that `--profile START:STOP` names, without STOP; none without a text."""
    start, colon, stop = text.partition(":")
    if not text:
        return range(0)
    if not (colon and start.isdecimal() and stop.isdecimal() and 0 < int(start) < int(stop)):
        raise InputError(f"--profile {text}: give two steps, such as 10:13 for 10, 11 and 12")
    return range(int(start), int(stop))


class Profiler:
    """Writes a trace of some steps into a folder, when the last of them is done."""

    def __init__(self, steps: range, folder: Path) -> None:
        self._steps, self._folder = steps, folder
        self._running = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """What is started within is of this step."""
        if number not in self._steps:
            yield
            return
        if not self._running:
            jax.profiler.start_trace(self._folder)
            self._running = True
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield

    def done(self, number: int, state: Any) -> None:
        """Write the trace, if this was its last step: when the state after it is there."""
        if number + 1 == self._steps.stop:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Write what there is of a trace that has begun."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
