"""The time of each instruction of a compiled program, from a trace of JAX's profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import jax

from xform.errors import WrongArgument


def trace_instructions(run: Callable[[], object], names: Collection[str]) -> dict[str, float]:
    """Run a function under the profiler, and return the seconds of each instruction.

    Args:
      run: calls the compiled program, and waits for its result. It calls no other program.
      names: the names of the program's instructions in HLO.

    Returns:
      Seconds by instruction, added up over the threads or streams of the device, and over the
      iterations of loops.

    Raises:
      WrongArgument: a trace is running already.
    """
    options: Any = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls would fill the trace
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise WrongArgument(
                "compare_with_device with a trace", str(error).partition("\n")[0], "",
                "stop the running trace of the profiler, or pass trace=False",
            ) from None  # fmt: skip
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        planes: list[Any] = [
            plane
            for path in files
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        ]
        return seconds_by_instruction(planes, names)


def seconds_by_instruction(planes: Iterable[Any], names: Collection[str]) -> dict[str, float]:
    """Return the seconds of each instruction in the planes of a trace."""
    seconds: dict[str, float] = {}
    for plane in planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            for event in line.events:
                name = _of_kernel(event) if on_gpu else _of_operation(event.name)
                if name in names:
                    seconds[name] = seconds.get(name, 0.0) + 1e-9 * event.duration_ns
    return seconds


def _of_operation(name: str) -> str:
    """Return the instruction of an event: on a TPU it is the text of the instruction."""
    return name.partition(" = ")[0].removeprefix("%")


def _of_kernel(event: Any) -> str:
    """Return the instruction of a kernel's event on a GPU: a statistic names it."""
    return next((str(value) for key, value in event.stats if key == "hlo_op"), "")
