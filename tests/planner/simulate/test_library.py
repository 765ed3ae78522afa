"""The contents of library calls, compared with the custom fusions that XLA:CPU compiles."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.kernels import kernels
from xform.planner.simulate.flat import flatten
from xform.planner.simulate.library import library_calls
from xform.planner.simulate.liveness import simulate
from xform.planner.simulate.loop_fusion import LoopFusion
from xform.planner.simulate.profiles import CPU
from xform.program.ir import trace

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
PARTS = {"reduce_sum": "reduce", "reduce_max": "reduce", "dot_general": "dot"}


def found(f, *args):
    """Return the flat program, and the calls in it."""
    flat = flatten(trace(lambda *xs: jax.tree.leaves(f(*xs)), *args), CPU)
    place = LoopFusion(flat, CPU).visit_index
    return flat, library_calls(flat, sorted(flat.steps, key=place.__getitem__), CPU)


def parts(does) -> list[str]:
    return sorted(PARTS.get(d, d) for d in does if PARTS.get(d, d) in PARTS.values())


TAKEN = {
    "nothing else": lambda x: jnp.sum(x),
    "a product before it": lambda x: jnp.sum(x @ x),
    "what two reductions read is in neither": lambda x: jnp.sum(jnp.exp(x) - jnp.max(x @ x, 0)),
    "a reduction of a reduction": lambda x: jnp.max(jnp.sum(x * 2, 0) + jnp.sum(x, 0)),
    "what it is subtracted from": lambda x: jnp.exp(x @ x) - jnp.sum(jnp.exp(x @ x), 1)[:, None],
    "a norm": lambda x: (x - jnp.mean(x, -1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1))[:, None],
    "what is an output too stays": lambda x: jnp.sum((x @ x) @ x) + (x @ x),
    "a product by columns is a call of its own": lambda x: jnp.sum(x.T @ x),
    "a sum that is an output too": lambda x: (s := jnp.sum(x * 2, 1), jnp.exp(x) - s[:, None]),
    "products alone": lambda x: x @ x @ x,
    "a small one is none": lambda x: jnp.sum(x[:4, :4]) + x,
}
ALONE = (jnp.exp, jnp.tanh, jnp.abs, jnp.log1p, jnp.floor, lax.logistic, lax.rsqrt, jnp.sign,
         jnp.sin, jnp.cos, jnp.tan, jnp.arctan, lax.erf, jnp.isfinite)  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_calls_are_those_of_the_compiler(name: str) -> None:
    """Compare the products and reductions in each call, except single products without readers."""
    _, made = found(TAKEN[name], X)
    ours = sorted(parts(s.primitive.name for s in steps) for steps in made.values())
    theirs = sorted(parts(k.does) for k in kernels(TAKEN[name], X) if k.library)
    assert ours == [way for way in theirs if way != ["dot"]]


@pytest.mark.parametrize("op", ALONE, ids=lambda op: op.__name__)
def test_temp_bytes_of_op_then_reduction_equal_xla_cpu(op) -> None:
    f = lambda x: jnp.sum(op(x).astype(jnp.float32), 0)
    took = jax.jit(f).lower(X).compile().memory_analysis().temp_size_in_bytes
    seen = simulate(trace(lambda x: [f(x)], X), "cpu").temp_bytes
    assert seen == took


@pytest.mark.parametrize(("dtype", "known"), [
    (jnp.float32, True), (jnp.bfloat16, True), (jnp.int32, False),
])  # fmt: skip
def test_types_that_the_library_knows(dtype, known: bool) -> None:
    f = lambda x: jnp.max(x, 0)
    x = jax.ShapeDtypeStruct((64, 64), dtype)
    assert bool(found(f, x)[1]) is known
    assert any(k.library for k in kernels(f, x)) is known


@pytest.mark.parametrize("f", [
    lambda x: jnp.sum(jnp.exp(x @ x) * 2, 1) / jnp.max(x, 1),
    lambda x: (s := jnp.sum(jnp.exp(x) * 2, 1), jnp.exp(x @ x) - s[:, None]),
])  # fmt: skip
def test_each_step_is_in_one_call_of_which_only_the_last_is_read(f) -> None:
    flat, made = found(f, X)
    steps = [s for members in made.values() for s in members]
    assert len(set(steps)) == len(steps) > 2
    for root, members in made.items():
        assert members[0] is root
        read = {c for s in flat.steps if s not in members for c in s.operands}
        assert not read.union(flat.outputs) & {s.results[0] for s in members[1:]}


def test_without_a_product_or_a_reduction_there_is_no_call() -> None:
    for f in (lambda x: x, lambda x: jnp.exp(x).T, lambda x: jnp.sort(x)):
        assert found(f, X)[1] == {}
