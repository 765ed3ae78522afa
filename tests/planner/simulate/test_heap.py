"""The heap, compared with XLA:CPU's assignment and by hand."""

import random
import uuid
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from xform.memory import buffers
from xform.memory.proto import Message
from xform.planner.simulate.heap import HeapValue, heap_bytes
from xform.planner.simulate.liveness import simulate
from xform.program.ir import trace

W = jax.ShapeDtypeStruct((512, 512), jnp.float32)
X = jax.ShapeDtypeStruct((64, 256), jnp.float32)
# Each of these leaves gaps between its values.
SEEDS = [4, 14, 22, 24, 27]
ALLOC, FREE, SHARE = range(3)


def chain(seed: int):
    """A chain of products of many sizes, some of which are read late."""
    rng = random.Random(seed)
    sizes = [64 * rng.randint(1, 8) for _ in range(4)]
    steps = [(rng.random(), rng.random(), rng.choice(sizes), rng.random()) for _ in range(24)]

    def f(w, x):
        pool = [x]
        for first, second, n, adds in steps:
            a, b = (pool[-6:][int(r * len(pool[-6:]))] for r in (first, second))
            y = jnp.tanh(w[:n, : a.shape[0]] @ a)
            pool.append(y + b if adds < 0.4 and b.shape == y.shape else y)
        return [jnp.sum(p) for p in pool[-3:]]

    return f


def compiled(f, folder: Path) -> bytes:
    """Return XLA's dump of a compiled program, which has the events of its heap.

    A unique option makes JAX's compilation cache miss: a cached program is not dumped.
    """
    unique = {"xla_dump_emitter_re": uuid.uuid4().hex}
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True, **unique}
    jax.jit(f).lower(W, X).compile(options)
    (dump,) = folder.glob("*after_optimizations.hlo.pb")
    return dump.read_bytes()


def heap_of(module: bytes) -> tuple[list[int], list[HeapValue]]:
    """Return the buffers of a compiled program, and its values in steps of XLA's heap events."""
    assignment = Message(module).message(3)
    size = {b.number(1): b.number(2) for b in assignment.messages(1)}
    (trace,) = assignment.messages(4)
    storage, born, dies = dict[int, int](), dict[int, int](), dict[int, int]()
    sizes = list[int]()
    for i, event in enumerate(trace.messages(1)):
        kind, buffer = event.number(1), event.number(2)
        if kind == FREE:
            dies[buffer] = i
            continue
        if kind == ALLOC:
            sizes.append(size[buffer])
        storage[buffer] = storage[event.number(5)] if kind == SHARE else len(sizes) - 1
        born[buffer] = i
    return sizes, [HeapValue(storage[b], born[b], dies[b], b) for b in born]


@pytest.mark.parametrize("seed", SEEDS)
def test_heap_and_live_bytes_equal_xla_cpu_buffer_assignment(seed: int, tmp_path: Path) -> None:
    f = chain(seed)
    module = compiled(f, tmp_path)
    seen = buffers.read(module)
    live = max(seen.live) - seen.argument_bytes - seen.output_bytes
    assert live < seen.temp_bytes
    assert heap_bytes(*heap_of(module), live) == seen.temp_bytes
    ours = simulate(trace(f, W, X), "cpu")
    assert max(ours.live) == live
    assert (ours.temp_bytes, ours.total_bytes) == (seen.temp_bytes, seen.total_bytes)


def test_a_heap_of_simultaneously_live_values_has_no_gaps() -> None:
    values = [HeapValue(i, i, 9, i) for i in range(4)]
    assert heap_bytes([64, 256, 128, 64], values, 512) == 512
    assert heap_bytes([], [], 0) == 0


def test_heap_bytes_include_gaps_between_values() -> None:
    """The large values are at offset 0, one after the other; each small one is above another."""
    values = [
        HeapValue(0, 1, 2, 0),
        HeapValue(1, 3, 5, 1),
        HeapValue(2, 2, 5, 2),
        HeapValue(3, 0, 1, 3),
    ]
    assert heap_bytes([64, 256, 64, 256], values, 320) == 384


def test_of_two_orders_that_which_takes_less_is_kept() -> None:
    """By falling size: 448 bytes; by falling lifetime the two earliest are at the bottom."""
    values = [
        HeapValue(0, 3, 5, 0),
        HeapValue(1, 0, 3, 1),
        HeapValue(2, 4, 5, 2),
        HeapValue(3, 0, 3, 3),
    ]
    assert heap_bytes([128, 128, 192, 128], values, 384) == 384


def test_values_of_one_buffer_are_placed_once() -> None:
    values = [HeapValue(0, 0, 2, 0), HeapValue(0, 2, 5, 1), HeapValue(1, 3, 4, 2)]
    assert heap_bytes([512, 128], values, 640) == 640


def test_values_much_smaller_than_the_peak_leave_no_gaps() -> None:
    sizes = [2**20, *[64] * 50]
    values = [HeapValue(0, 0, 60, 0), *(HeapValue(i, i, i + 1, i) for i in range(1, 51))]
    assert heap_bytes(sizes, values, 2**20 + 128) == 2**20 + 128
