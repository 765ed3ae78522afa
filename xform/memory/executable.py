"""Compile a lowered program for devices of this process, and read the compiler's figures."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any

import jax

from xform.memory.answers import Answer
from xform.memory.worker import compiler_figures


def compile_here(lowered: Any, options: Mapping[str, Any] | None = None) -> tuple[Any, Answer]:
    """Compile JAX's `Lowered` object; return JAX's `Compiled` object and the compiler's answer.

    `options` are further options of the compiler. The first result is None if the compiler fails.
    """
    start = time.perf_counter()
    try:
        with _recorded_compilations() as recorded:
            compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        return None, Answer({}, time.perf_counter() - start, None, str(error))
    seconds = time.perf_counter() - start if recorded else 0.0
    module = _module(compiled)
    return compiled, Answer(compiler_figures(compiled), seconds, module, known=not recorded)


@contextlib.contextmanager
def _recorded_compilations() -> Generator[list[str]]:
    """A list that gets an entry for each program that JAX compiles here, in this thread.

    JAX keeps the programs that it has compiled: if it has a program, it compiles nothing.
    """
    compiled: list[str] = []
    thread = threading.get_ident()

    def record(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration") and threading.get_ident() == thread:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(record)


def _module(compiled: Any) -> bytes | None:
    """Return the HloProto of a compiled program; None if the backend does not keep its parts.

    An HloProto has the module in field 1 and the buffer assignment in field 3.
    """
    assignment = getattr(compiled.memory_analysis(), "serialized_buffer_assignment_proto", b"")
    try:
        (module,) = compiled.runtime_executable().hlo_modules()
    except (ValueError, jax.errors.JaxRuntimeError):
        return None
    if not assignment:
        return None
    parts = (1, module.as_serialized_hlo_module_proto()), (3, bytes(assignment))
    return b"".join(_field(number, data) for number, data in parts)


def _field(number: int, data: bytes) -> bytes:
    """Return a field of bytes in the wire format of protocol buffers."""
    size, length = len(data), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data
