"""The order in which groups run equals XLA:CPU's schedule of the same program's kernels."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.kernels import kernels
from tests.planner.simulate.test_loop_fusion import steps_of
from xform.planner.simulate.breadth_first import breadth_first_order
from xform.planner.simulate.flat import flatten
from xform.planner.simulate.fusion import FusionGroup
from xform.planner.simulate.loop_fusion import LoopFusion
from xform.planner.simulate.profiles import CPU
from xform.planner.simulate.steps import FlatProgram
from xform.program.ir import trace
from xform.steering.barrier import barrier

X = jax.ShapeDtypeStruct((256, 256), jnp.float32)
# Operations that tell kernels apart, by our names and XLA's.
WORDS = {"tanh": "tanh", "sin": "sine", "exp": "exponential", "log": "log", "dot_general": "dot",
         "sub": "subtract", "cos": "cosine"}  # fmt: skip


def square(x):
    return lax.dot(x, x)


def after(x, *waits):
    return barrier([x], list(waits))[0]


def readers_as_xla_comes_to_them(x):
    x = square(x)
    early, late = jnp.sin(x), jnp.exp(x)
    return square(late) - square(early)


def a_barrier_of_two_readers(x):
    y = square(x)
    z = after(x, y)
    h, g = jnp.tanh(z), jnp.sin(z) * 2
    return square(h + g) + square(jnp.cos(g) - h) + square(jnp.exp(y))


def a_barrier_and_a_product(x):
    y = square(x)
    h = jnp.tanh(after(x, y))
    k = jnp.exp(h + 1)
    return square(h) - square(k) @ square(jnp.sin(y)) - square(square(y))


def what_is_repeated_in_loops_and_before_a_product(x):
    y = jnp.tanh(square(x))
    m = y * 0.5
    return (m @ x - jnp.exp(m)) @ (jnp.sin(m + x) - m.T)


def a_softmax_run_again(x):
    y = square(x)
    e = jnp.exp(x)
    s = after(jnp.sum(e, 1), y)
    p = e / s[:, None]
    g = jnp.tanh(y @ x)
    return square(jnp.sin(p)) - square(square(jnp.cos(p)) * g)


PROGRAMS = [readers_as_xla_comes_to_them, a_barrier_of_two_readers, a_barrier_and_a_product,
            what_is_repeated_in_loops_and_before_a_product, a_softmax_run_again]  # fmt: skip


def run(f) -> tuple[FlatProgram, LoopFusion, list[FusionGroup]]:
    flat = flatten(trace(lambda x: jax.tree.leaves(f(x)), X), CPU)
    fusion = LoopFusion(flat, CPU)
    return flat, fusion, breadth_first_order(fusion, flat.inputs)


def words(group: FusionGroup) -> tuple[str, ...]:
    """Return the operations of a group that tell kernels apart."""
    steps = steps_of(group)
    return tuple(sorted(WORDS[s.primitive.name] for s in steps if s.primitive.name in WORDS))


@pytest.mark.parametrize("f", PROGRAMS)
def test_groups_run_in_the_order_of_xlas_schedule(f) -> None:
    ours = [found for g in run(f)[2] if (found := words(g))]
    theirs = [tuple(w for w in k.does if w in WORDS.values()) for k in kernels(f, X)]
    assert ours == [found for found in theirs if found]


def test_a_group_runs_when_its_operands_are_there() -> None:
    f = lambda x: (square(jnp.exp(x)) + square(x), lax.scan(
        lambda c, _: (c * 2, c), x, None, length=3)[1])  # fmt: skip
    flat, fusion, order = run(f)
    assert sorted(map(id, order)) == sorted(map(id, fusion.groups))
    there = set(flat.inputs)
    for group in order:
        assert there.issuperset(group.reads)
        there.update(group.root.results)
