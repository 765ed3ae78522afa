"""The events that are derived from the places of buffers are those that XLA lists in its dump."""

from typing import Any

import jax
import pytest

from tests.memory.dumps import PROGRAMS, dumped
from tests.memory.test_buffers import message
from xform.memory.buffers import Assignment, read
from xform.memory.executable import compile_here
from xform.memory.proto import Message


def chunks(a: Assignment) -> list[Any]:
    """Return what a report needs of the chunks of an assignment, in their order."""
    return [(c.allocation.index, c.bytes, c.buffers, c.born, c.dies) for c in a.chunks]


def without_events(data: bytes) -> bytes:
    """Return a dump without the events of its heaps, which are field 4 of the assignment."""
    module, assignment = Message(data).raw(1), Message(Message(data).raw(3))
    kept = {f"f{n}": [bytes(value) for value in assignment._bytes(n)] for n in (1, 2, 3)}
    return message(f1=module, f3=message(**kept))


@pytest.mark.parametrize("name", PROGRAMS)
def test_derived_events(name: str) -> None:
    data, _ = dumped(name)
    assert chunks(read(without_events(data))) == chunks(read(data))


def test_a_program_that_was_compiled_to_run() -> None:
    f, args, options = PROGRAMS["donated"]
    jax.clear_caches()  # JAX keeps the source line of the first call of a jitted function
    answer = compile_here(jax.jit(f, **options).lower(*args))[1]
    dump, _ = dumped("donated")
    assert answer.compile_seconds > 0
    assert answer.module is not None
    assert chunks(read(answer.module)) == chunks(read(dump))
