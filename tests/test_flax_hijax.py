"""Hijax Variables of Flax: read and written in order, refused if a gradient would be lost."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import hijax

import xform
from tests.nnx import X
from xform.errors import NotDifferentiable, WrongDtype

pytestmark = pytest.mark.usefixtures("quick_compilation")

# JAX 0.12 has no mutable values that know their contents.
HIJAX = pytest.mark.skipif(not hasattr(hijax, "AvalQDD"), reason="of JAX before 0.12")


def _counting(t: Any, kind: str) -> Any:
    """Return value, gradient and count for a module of hijax Variables."""
    with nnx.var_defaults(hijax=True):
        model = nnx.Dict(w=nnx.Param(X[:3]), count=nnx.Variable(jnp.float32(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    params = nnx.with_vars(params, hijax=False)

    def once(params: Any, rest: Any) -> jax.Array:
        inside = nnx.merge(graph, params, rest)
        inside.count[...] += 1
        return inside.count[...] * jnp.sum(jnp.sin(X @ inside.w[...]))

    def twice(params: Any, rest: Any) -> jax.Array:
        return once(params, rest) + 10 * once(params, rest)

    over = lambda params: twice(params, rest)
    made = {
        "closed over": lambda: jax.jit(t.value_and_grad(over))(params),
        "argument": lambda: jax.jit(t.value_and_grad(twice))(params, rest),
        "jitted": lambda: t.value_and_grad(lambda p: jax.jit(twice)(p, rest))(params),
        "jvp": lambda: jax.jit(lambda p: t.jvp(over, (p,), (p,)))(params),
    }[kind]()
    return jax.tree.leaves(made), model.count[...]


@HIJAX
@pytest.mark.parametrize("kind", ["closed over", "argument", "jitted", "jvp"])
def test_hijax_variables_are_read_and_written_in_order(kind: str) -> None:
    chex.assert_trees_all_close(_counting(xform, kind), _counting(jax, kind), rtol=1e-5)


@HIJAX
@pytest.mark.parametrize("place", [lambda f: f, jax.jit])
def test_differentiated_values_in_hijax_variables_raise(place: Any) -> None:
    def kept(w: jax.Array) -> jax.Array:
        return jnp.sum(nnx.Variable(w, hijax=True)[...] ** 2)

    def written(w: jax.Array) -> jax.Array:
        total[...] = jnp.sum(w)
        return total[...]

    total = nnx.Variable(jnp.float32(0), hijax=True)
    for f in (kept, written):
        with pytest.raises(NotDifferentiable, match="to a mutable value"):
            place(xform.grad(f))(X)
    with pytest.raises(WrongDtype, match="mutable value"):
        place(xform.grad(lambda v: v[...]))(total)
    with pytest.raises(NotDifferentiable, match="write to it a second time"):
        place(xform.grad(xform.checkpoint(lambda x: total[...] * x)))(1.0)
