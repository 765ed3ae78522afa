"""Cotangents that do not come: they are absent, not zeros, as zero times infinity is NaN."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform

WRAPS = {"eager": lambda f: f, "jit": jax.jit}


def both(x: Any) -> Any:
    """An output that is used, and one whose derivative is infinite at 0."""
    return 2 * x, jnp.sqrt(x)


def scanned(x: Any) -> Any:
    step = lambda c, _: ((c[0] * 2, jnp.sqrt(c[1])), jnp.sqrt(c[1]))
    (a, b), ys = lax.scan(step, (x, x), None, length=2)
    return a, b, ys.sum()


def mapped(x: Any) -> Any:
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("i")
    return jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec)(x * jnp.ones(2))


def roots(x: Any) -> Any:
    rule = jax.custom_vjp(both)
    rule.defvjp(lambda x: (both(x), x), lambda x, cts: (2 * cts[0] + cts[1] / jnp.sqrt(x + 1),))
    return rule(x)


LOOPED = lambda x: lax.fori_loop(0, 2, lambda i, c: (c[0] * 2, jnp.sqrt(c[1])), (x, x))
MATRIX = lambda x: jnp.eye(3) * (1 + x)
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda x: jax.jit(both)(x)[0],
    "checkpoint": lambda x: jax.checkpoint(both)(x)[0],
    "cond": lambda x: lax.cond(x < 1, both, lambda x: (x, x), x)[0],
    "switch": lambda x: lax.switch(0, [both, both], x)[0],
    "scan": lambda x: scanned(x)[0],
    "fori_loop": lambda x: LOOPED(x)[0],
    "map": lambda x: lax.map(both, jnp.stack([x, x]))[0].sum(),
    "shard_map": lambda x: mapped(x)[0].sum(),
    "custom_vjp": lambda x: jax.jit(roots)(x)[0],
    "custom_jvp": lambda x: jax.jit(lambda x: (jax.nn.relu(x + 1), jnp.sqrt(x)))(x)[0],
    "nested": lambda x: jax.jit(lambda x: jax.checkpoint(lambda x: jax.jit(scanned)(x))(x))(x)[0],
    "svd": lambda x: jnp.linalg.svd(MATRIX(x))[1].sum(),
    "eigh": lambda x: jnp.linalg.eigh(MATRIX(x))[0].sum(),
    "power": lambda x: (x + 0.0) ** 2.5,
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unused_output_makes_no_nan(name: str, wrap: str) -> None:
    f = PROGRAMS[name]
    want = WRAPS[wrap](jax.grad(f))(0.0)
    assert np.isfinite(want)
    for g in (xform.grad(f), xform.jacrev(f), lambda x: xform.vjp(f, x)[1](1.0)[0]):
        np.testing.assert_allclose(WRAPS[wrap](g)(0.0), want, rtol=1e-5)


def test_a_while_loop_makes_no_nan() -> None:
    loop = lambda x: lax.while_loop(
        lambda c: c[2] < 2, lambda c: (c[0] * 2, jnp.sqrt(c[1]), c[2] + 1), (x, x, 0)
    )[0]
    assert float(xform.grad(loop)(0.0)) == float(jax.jit(xform.grad(loop))(0.0)) == 4.0


def test_an_auxiliary_output_makes_no_nan() -> None:
    @jax.jit
    def loss(w: Any) -> Any:
        return (2 * w).sum(), jnp.linalg.norm(w)

    w = jnp.zeros(3)
    for g in (xform.grad(loss, has_aux=True)(w)[0], xform.value_and_grad(loss, has_aux=True)(w)[1]):
        np.testing.assert_array_equal(g, 2 * jnp.ones(3))
    np.testing.assert_array_equal(xform.vjp(loss, w, has_aux=True)[1](1.0)[0], 2 * jnp.ones(3))
    second = lambda x: xform.grad(lambda x: x**0.5)(x)
    assert float(xform.grad(second)(0.0)) == float(jax.grad(jax.grad(lambda x: x**0.5))(0.0))


def uses_all() -> Any:
    """A rule that is no linear function of its cotangents: all of them enter it."""
    f = jax.custom_vjp(lambda x: (x, 2 * x))
    f.defvjp(lambda x: (f(x), None), lambda _, cts: (cts[0] + jnp.cos(cts[1]),))
    return f


@pytest.mark.parametrize("order", [0, 1])
def test_a_users_rule_is_given_zeros_beside_a_cotangent(order: int) -> None:
    f = uses_all()
    one = lambda x: jax.jit(lambda x: (jnp.sin(x), *f(x)))(x)[1 + order]
    for wrap in WRAPS.values():
        assert float(wrap(xform.grad(one))(3.0)) == float(wrap(jax.grad(one))(3.0))
    batched = jax.vmap(xform.grad(one))(jnp.arange(2.0))
    np.testing.assert_allclose(batched, jax.vmap(jax.grad(one))(jnp.arange(2.0)))
    assert np.isfinite(jax.jit(jax.grad(xform.grad(one)))(3.0))
    assert np.isfinite(xform.grad(jax.grad(one))(3.0))
