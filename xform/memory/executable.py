"""Read the memory figures of a program that JAX has already compiled.

The program was compiled to be run. Reading its figures here saves another compilation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Any

import jax

from xform.memory.answers import Answer
from xform.memory.worker import KINDS


def executable_answer(compiled: Any, seconds: float, known: bool = False) -> Answer:
    """Return the compiler's answer for JAX's `Compiled` object: its bytes and, if kept, its module.

    `seconds` is the time that the compilation took; `known` says whether JAX had compiled the
    program before.
    """
    seconds = 0.0 if known else seconds
    stats = compiled.memory_analysis()
    if stats is None:
        return Answer({}, seconds, None, known=known)
    sizes = {kind: int(getattr(stats, f"{kind}_size_in_bytes", None) or 0) for kind in KINDS}
    return Answer(sizes, seconds, _module(compiled, stats), known=known)


@contextlib.contextmanager
def recorded_compilations() -> Generator[list[str]]:
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


def _module(compiled: Any, stats: Any) -> bytes | None:
    """Return the HloProto of a compiled program; None if the backend does not keep its parts.

    An HloProto has the module in field 1 and the buffer assignment in field 3.
    """
    assignment = getattr(stats, "serialized_buffer_assignment_proto", b"")
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
