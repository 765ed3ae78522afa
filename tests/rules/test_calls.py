"""Calls with more than a body: a vmap rule, a transpose, a mark."""

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


# A vmap rule that computes something else than the function, so that it can be recognized.


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


def stacked(f):
    """Return a function whose vmap rule declares each output batched, as a rule may."""
    g = custom_vmap(f)

    @g.def_vmap
    def _(size, batched, *xs):
        ys = jax.vmap(f, [0 if b else None for b in batched], axis_size=size)(*xs)
        return ys, jax.tree.map(lambda _: True, ys)

    return g


STACKED = {
    "one": lambda x: stacked(lambda x: (jnp.sin(x), x))(x)[0],
    "beside a constant": lambda x: stacked(lambda x, n: jnp.sin(x) * n)(x, np.arange(3)),
    "constant": lambda x: stacked(lambda x: (x, jnp.full(3, 0.3)))(x)[1] + x,
    "closed over": lambda x: stacked(lambda y: jnp.sin(x) * y)(np.arange(3.0)),
    "both": lambda x: stacked(lambda y: jnp.sin(x) * y)(x),
    "twice": lambda x: stacked(stacked(jnp.sin))(x),
    "in a scan": lambda x: lax.scan(lambda c, _: (stacked(jnp.sin)(c), None), x, None, 2)[0],
}
PLAIN = {
    "one": jnp.sin,
    "beside a constant": lambda x: jnp.sin(x) * np.arange(3),
    "constant": lambda x: x + 0.3,
    "closed over": lambda x: jnp.sin(x) * np.arange(3.0),
    "both": lambda x: jnp.sin(x) * x,
    "twice": jnp.sin,
    "in a scan": lambda x: jnp.sin(jnp.sin(x)),
}


@pytest.mark.parametrize("name", STACKED)
def test_where_tangents_alone_are_batched_outputs_are_not(name: str) -> None:
    f, plain = STACKED[name], PLAIN[name]
    close(xform.jacfwd(f)(X), jax.jacfwd(plain)(X))
    close(xform.jacrev(f)(X), jax.jacfwd(plain)(X))
    close(xform.hessian(lambda x: f(x).sum())(X), jax.hessian(lambda x: plain(x).sum())(X))
    close(xform.jacfwd(xform.jacfwd(f))(X), jax.jacfwd(jax.jacfwd(plain))(X))
    push = lambda x, dx: xform.jvp(f, (x,), (dx,))
    y, dys = jax.vmap(push, (None, 0), (None, 0))(X, np.eye(3))
    close((y, dys), (plain(X), jax.jacfwd(plain)(X).T))
    xs = np.stack([X, X + 1])
    close(jax.vmap(xform.jacfwd(f))(xs), jax.vmap(jax.jacfwd(plain))(xs))


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
