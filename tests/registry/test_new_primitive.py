"""A new primitive needs a rule and a case, and then works in every transform and analysis.

A rule file would state the rules below: `decay` is elementwise, and `doubled_sum` is
linear and sums over axes. Nothing else of xform knows them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import xform
from xform.memory.batch_axes import batch_axes
from xform.passes import Cse, Dce, Pipeline, Simplify
from xform.program.ir import trace
from xform.registry.ends import summed
from xform.registry.traits import EXPENSIVE, REDUCTION, with_ends
from xform.registry.words import linear, pointwise
from xform.slices.opened import opened
from xform.slices.region import find_region
from xform.testing import Case, check_rule

# What JAX has to know: how to run, type, batch and lower the two primitives.


def _decay(x: Any) -> Any:
    return lax.exp(lax.neg(x))


def _doubled_sum(x: Any, *, axes: tuple[int, ...]) -> Any:
    return lax.mul(lax.reduce_sum(x, axes), np.asarray(2, x.dtype))


def _batched_sum(args: Any, dims: Any, *, axes: tuple[int, ...]) -> Any:
    (x,), (dim,) = args, dims
    moved = tuple(axis + (axis >= dim) for axis in axes)
    return doubled_sum_p.bind(x, axes=moved), dim - sum(axis < dim for axis in moved)


decay_p, doubled_sum_p = Primitive("decay_of_the_test"), Primitive("doubled_sum_of_the_test")
for _prim, _f in ((decay_p, _decay), (doubled_sum_p, _doubled_sum)):
    _prim.def_impl(_f)
    _prim.def_abstract_eval(lambda x, _f=_f, **params: jax.make_jaxpr(
        lambda x: _f(x, **params))(x).out_avals[0])  # fmt: skip
    mlir.register_lowering(_prim, mlir.lower_fun(_f, multiple_results=False))
batching.defvectorized(decay_p)
batching.primitive_batchers[doubled_sum_p] = _batched_sum

# What xform has to know: the rules.


def _spread(ct: Any, x: Any, *, axes: tuple[int, ...]) -> Any:
    kept = tuple(i for i in range(x.ndim) if i not in axes)
    return lax.broadcast_in_dim(lax.mul(ct, np.asarray(2, ct.dtype)), x.shape, kept)


pointwise(decay_p, lambda y, x: lax.neg(y), traits=EXPENSIVE)
linear(doubled_sum_p, _spread, traits=with_ends(REDUCTION, summed))

# The cases.

X = np.linspace(-1.0, 1.0, 6).reshape(2, 3)
CASES = [
    Case("decay_of_the_test", decay_p.bind, (X,), jax=False),
    Case("doubled_sum_of_the_test", lambda x: doubled_sum_p.bind(x, axes=(1,)), (X,), jax=False),
]


def loss(w: Any, x: Any) -> Any:
    """A loss of rows that uses both primitives."""
    h = decay_p.bind(jnp.tanh(x @ w["a"]) @ w["b"])
    return doubled_sum_p.bind(doubled_sum_p.bind(h * h, axes=(1,)), axes=(0,))


def with_jax(w: Any, x: Any) -> Any:
    """The same loss in operations of JAX."""
    return 4 * jnp.sum(jnp.exp(-(jnp.tanh(x @ w["a"]) @ w["b"])) ** 2)


def arguments(rows: int = 64, width: int = 16) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    draw = lambda key, *shape: 0.1 * jax.random.normal(key, shape)
    w = {"a": draw(keys[0], 8, width), "b": draw(keys[1], width, 8)}
    return w, draw(keys[2], rows, 8)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.primitive)
def test_derivatives(case: Case) -> None:
    """Forward and reverse mode, eager, under jit, vmap and in a scan."""
    check_rule(case)


def check_gradient(policy: Any, w: Any, x: Any) -> None:
    got = jax.jit(xform.grad(loss, policy=policy))(w, x)
    for a, b in zip(*map(jax.tree.leaves, (got, jax.grad(with_jax)(w, x))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_plan_recomputes_them() -> None:
    w, x = arguments()
    plan = xform.plan(loss, w, x, policy="saved:1KiB")
    decisions = {row.operation: row.decision for row in plan.rows}
    assert decisions[decay_p.name] == "RECOMPUTE"
    check_gradient(plan, w, x)


def test_a_budget_runs_them_in_slices() -> None:
    w, x = arguments(rows=256, width=256)
    plan = xform.plan(loss, w, x, policy="slices:budget:192KiB")
    assert plan.slices
    check_gradient(plan, w, x)


def test_a_region_contains_them() -> None:
    w, x = arguments()
    prog = opened(trace(lambda *xs: [loss(w, *xs)], x))
    (matrix,) = prog.inputs
    region = find_region(prog, matrix, 0, 4)
    assert region is not None
    names = {eqn.primitive.name for eqn, _ in region.equations}
    assert {decay_p.name, doubled_sum_p.name} <= names
    assert [slicing.summed for _, slicing, _ in region.outputs] == [True]


def test_sparsity() -> None:
    both = lambda x: doubled_sum_p.bind(decay_p.bind(x), axes=(1,))
    found = xform.sparse.sparsity(both, jnp.ones((3, 2)))
    assert (found.rows.tolist(), found.cols.tolist()) == ([0, 0, 1, 1, 2, 2], [*range(6)])


def test_the_rows_are_a_batch() -> None:
    w, x = arguments()
    flat, tree = jax.tree.flatten((w, x))
    g = lambda *xs: jax.tree.leaves(xform.grad(loss)(*jax.tree.unflatten(tree, xs)))
    assert [batch[:2] for batch in batch_axes(trace(g, *flat))] == [(64, ((2, 0),))]


def test_health_finds_the_layers() -> None:
    w, x = arguments()
    report = xform.health(loss, w, x, power_iterations=1)
    assert [row.name for row in report] == ["a", "b"]


def test_passes() -> None:
    twice = lambda x: decay_p.bind(x) * decay_p.bind(x) + 0 * doubled_sum_p.bind(x, axes=(0,))[0]
    f = Pipeline([Simplify(), Cse(), Dce()])(twice)
    names = [e.primitive.name for e in jax.make_jaxpr(f)(jnp.ones(3)[:, None]).eqns]
    assert names.count(decay_p.name) == 1
    x = jnp.arange(3.0)[:, None]
    np.testing.assert_array_equal(f(x), twice(x))
