"""Calls that carry more than their body: a rule for vmap, a transpose, a mark."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.experimental.fused import fused
from jax.experimental.scheduling_groups import scheduling_group

import xform
from xform._jax import compute_on

X, Y = np.array([0.3, -1.2, 0.7]), np.float64(2.0)


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def close(a, b) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), a, b)


def test_composite_is_differentiated_through_its_body() -> None:
    f = lax.composite(lambda x: jnp.sin(x) * x, "xform.tests.f")
    close(xform.grad(lambda x: f(x).sum())(X), jnp.cos(X) * X + jnp.sin(X))
    close(xform.jvp(f, (X,), (X,))[1], (jnp.cos(X) * X + jnp.sin(X)) * X)


# A rule for vmap that does something else than the function, so that it can be told apart.


@custom_vmap
def f(x, y):
    return jnp.sin(x) * y


@f.def_vmap
def _(size, batched, x, y):
    return 3 * jnp.sin(x) * (y if batched[1] else jnp.broadcast_to(y, (size,))), True


DERIVATIVES = {
    "grad": (lambda x: xform.grad(f, (0, 1))(x, Y), lambda x: (jnp.cos(x) * Y, jnp.sin(x))),
    "jvp": (lambda x: xform.jvp(f, (x, Y), (1.0, 1.0))[1], lambda x: jnp.cos(x) * Y + jnp.sin(x)),
    "linearize": (lambda x: xform.linearize(f, x, Y)[1](1.0, 0.0), lambda x: jnp.cos(x) * Y),
    "second": (lambda x: xform.grad(xform.grad(f))(x, Y), lambda x: -jnp.sin(x) * Y),
}


@pytest.mark.parametrize("kind", DERIVATIVES)
@pytest.mark.parametrize("jit", [False, True])
def test_the_derivative_of_a_batch_is_that_of_the_rule(kind: str, jit: bool) -> None:
    derivative, expected = DERIVATIVES[kind]
    if jit:
        derivative = jax.jit(derivative)
    close(derivative(X[0]), expected(X[0]))
    close(jax.vmap(derivative)(X), jax.tree.map(lambda a: 3 * a, expected(X)))


def test_the_derivative_of_a_vmap_is_that_of_the_rule() -> None:
    total = lambda x, y: jax.vmap(f, (0, None))(x, y).sum()
    close(xform.grad(total, (0, 1))(X, Y), (3 * jnp.cos(X) * Y, 3 * jnp.sin(X).sum()))


def test_a_closed_over_value_of_custom_vmap() -> None:
    def outer(w, x):
        g = custom_vmap(lambda x: w * jnp.sin(x))
        g.def_vmap(lambda size, batched, x: (5.0 * jnp.sin(x), True))
        return g(x)

    close(jax.vmap(xform.grad(outer), (None, 0))(Y, X), jnp.sin(X))


def test_linear_call_uses_each_transpose_in_turn() -> None:
    f = lambda x: linear_call(lambda _, x: x, lambda _, ct: 7.0 * ct, (), x)
    turn = lambda f: lambda ct: xform.linear_transpose(f, 1.0)(ct)[0]
    assert [float(g(1.0)) for g in (f, turn(f), turn(turn(f)))] == [1.0, 7.0, 1.0]
    assert float(xform.grad(f)(1.0)) == 7.0
    assert float(xform.jvp(f, (1.0,), (2.0,))[1]) == 2.0


MARKS = {
    "compute_on": compute_on(
        jnp.sin, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device
    ),
    "xla_metadata_call": scheduling_group("a")(jnp.sin),
}


@pytest.mark.parametrize("name", MARKS)
def test_both_parts_carry_the_mark(name: str) -> None:
    pull = jax.make_jaxpr(lambda x, ct: xform.vjp(MARKS[name], x)[1](ct))(X, X)
    assert [e.primitive.name for e in pull.eqns] == [name, name]
    push = jax.make_jaxpr(lambda x: xform.jvp(MARKS[name], (x,), (x,)))(X)
    assert [e.primitive.name for e in push.eqns] == [name]
    close(xform.grad(lambda x: MARKS[name](x).sum())(X), jnp.cos(X))


def test_a_fused_call_is_differentiated_through_its_body() -> None:
    f = fused(out_spaces=(jax.memory.Space.Device,))(lambda x: (jnp.sin(x),))
    names = {e.primitive.name for e in jax.make_jaxpr(lambda x: xform.vjp(f, x)[1]((x,)))(X).eqns}
    assert names >= {"cos", "mul"}
