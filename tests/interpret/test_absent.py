"""Absent cotangents are not replaced by zeros, because zero times infinity is NaN."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.custom_batching import custom_vmap

import xform
import xform.flax

WRAPS = {"eager": lambda f: f, "jit": jax.jit}


def both(x: Any) -> Any:
    """Return a used output, and an output whose derivative is infinite at 0."""
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


def batched() -> Any:
    """A function with a vmap rule, made of two independent parts."""
    f = custom_vmap(lambda a, b: (2 * a, 3 * b))
    f.def_vmap(lambda n, on, a, b: ((2 * a, 3 * b), tuple(on)))
    return f


def gathered(x: Any) -> Any:
    """Collectives of two values each."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("i")
    across = lambda x: lax.ppermute(lax.all_gather(both(x), "i"), "i", [(0, 1), (1, 0)])
    return jax.shard_map(across, mesh=mesh, in_specs=spec, out_specs=spec)(x * jnp.ones(2))


SORTED = lambda x: lax.sort((jnp.arange(2), *map(jnp.atleast_1d, both(x * jnp.ones(2)))))
LOOPED = lambda x: lax.fori_loop(0, 2, lambda i, c: (c[0] * 2, jnp.sqrt(c[1])), (x, x))
MATRIX = lambda x: jnp.eye(3) * (1 + x)
W = np.arange(1.0, 7.0).reshape(2, 3)
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
    "custom_vmap": lambda x: batched()(*both(x))[0],
    "custom_vmap in a scan": lambda x: lax.scan(
        lambda c, _: (c, batched()(*c)), both(x), None, 2)[1][0].sum(),
    "optimization_barrier": lambda x: lax.optimization_barrier((*both(x), 3))[0],
    "optimization_barrier under jit": lambda x: jax.jit(
        lambda x: lax.optimization_barrier(both(x)))(x)[0],
    "device_put": lambda x: jax.device_put(both(x))[0],
    "device_put under jit": lambda x: jax.jit(lambda x: jax.device_put(both(x)))(x)[0],
    "collectives": lambda x: gathered(x)[0].sum(),
    "sort": lambda x: SORTED(x)[1].sum(),
    "nested": lambda x: jax.jit(lambda x: jax.checkpoint(lambda x: jax.jit(scanned)(x))(x))(x)[0],
    "svd": lambda x: jnp.linalg.svd(MATRIX(x))[1].sum(),
    "eigh": lambda x: jnp.linalg.eigh(MATRIX(x))[0].sum(),
    "power": lambda x: (x + 0.0) ** 2.5,
}  # fmt: skip


def pushed(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.jvp(f, (x,), (1.0,))[1]


# At least one JAX version pulls these as zeros, or refuses them.
PUSHED = {name for name in PROGRAMS if name.startswith(("optimization_barrier", "custom_vmap"))}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unused_output_makes_no_nan(name: str, wrap: str) -> None:
    f = PROGRAMS[name]
    want = WRAPS[wrap](pushed(f) if name in PUSHED else jax.grad(f))(0.0)
    assert np.isfinite(want)
    for g in (xform.grad(f), xform.jacrev(f), lambda x: xform.vjp(f, x)[1](1.0)[0]):
        np.testing.assert_allclose(WRAPS[wrap](g)(0.0), want, rtol=1e-5)


def test_a_while_loop_makes_no_nan() -> None:
    loop = lambda x: lax.while_loop(
        lambda c: c[2] < 2, lambda c: (c[0] * 2, jnp.sqrt(c[1]), c[2] + 1), (x, x, 0)
    )[0]
    assert float(xform.grad(loop)(0.0)) == float(jax.jit(xform.grad(loop))(0.0)) == 4.0


def keyed(state: Any) -> Any:
    """A step that sorts one carry and moves another with it; the moved one is dropped."""
    a, b, c = state
    return jnp.sin(b), lax.sort((c, a), num_keys=1)[0], 2 * b


LENGTHS: dict[str, Callable[[int, Any], Any]] = {
    "scan": lambda n, state: lax.scan(lambda s, _: (keyed(s), None), state, None, length=n)[0],
    "fori_loop": lambda n, state: lax.fori_loop(0, n, lambda _, s: keyed(s), state),
    "while_loop": lambda n, state: lax.while_loop(
        lambda s: s[0] < n, lambda s: (s[0] + 1, *keyed(s[1:])), (0, *state))[1:],
}  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_carry_that_depends_on_no_cotangent_gets_none(name: str, n: int, wrap: str) -> None:
    loss = lambda loop: lambda x, y: jnp.vdot(jnp.stack(loop(n, (x, x * y, x))[1:]), W)
    x, y = jnp.array([0.3, -0.7, 1.1]), jnp.array([1.3, 0.2, -0.4])
    want = jax.grad(loss(LENGTHS["scan"]), (0, 1))(x, y)
    got = WRAPS[wrap](xform.grad(loss(LENGTHS[name]), (0, 1)))(x, y)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


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
    """A rule that is not linear in its cotangents, and reads all of them."""
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


def test_a_constant_beside_a_moving_operand_makes_no_nan() -> None:
    for pair in (lax.optimization_barrier, jax.device_put):
        f = lambda x, pair=pair: sum(map(jnp.sqrt, pair((x, jnp.float32(0)))))
        for g in (xform.jacfwd(f), xform.grad(f), lambda x, f=f: xform.linearize(f, x)[1](1.0)):
            assert float(g(4.0)) == float(jax.jit(g)(4.0)) == 0.25


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit])
def test_a_metric_of_a_module_makes_no_nan(wrap: Any) -> None:
    model = nnx.Linear(3, 1, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))

    @wrap
    def loss(model: Any, x: Any) -> Any:
        y = model(x)
        return (y - 1).sum(), jnp.linalg.norm(model.kernel[...]) + jnp.sqrt(y).sum()

    x = jnp.ones((2, 3))
    for gradient in (xform.flax.grad, xform.flax.value_and_grad):
        got = jax.tree.leaves(gradient(loss, has_aux=True)(model, x))
        want = jax.tree.leaves(getattr(nnx, gradient.__name__)(loss, has_aux=True)(model, x))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
