"""Budgets of computations that take several derivatives: the whole compiled program keeps them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform import policies
from xform.errors import BudgetInfeasible

f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
WS = f32(64, 64), f32(64, 64), f32(1024, 64)


def loss(v, w, x):
    """Six layers with each of two shared weights."""
    h = x
    for _ in range(6):
        h = jnp.sin(h @ v)
    for _ in range(6):
        h = jnp.tanh(h @ w)
    return jnp.mean(h**2)


def product(policy):
    return lambda *primals: xform.hvp(loss, primals, primals, policy=policy)


def total(f, *args):
    return xform.memory_analysis(f, *args).total_bytes


def values():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, a.shape) / 8 for k, a in zip(keys, WS, strict=True)]


def test_a_product_keeps_budgets_down_to_its_floor() -> None:
    default = total(product(None), *WS)
    with pytest.raises(BudgetInfeasible, match="lowest peak") as caught:
        total(product(policies.budget("1 KiB")), *WS)
    floor = caught.value.floor_bytes
    assert floor < 0.7 * default
    for size in (floor, (floor + default) // 2):
        assert total(product(policies.budget(size)), *WS) <= size
    args = values()
    want = jax.jit(product(None))(*args)
    for got in (product(policies.budget(floor))(*args),
                jax.jit(product(policies.budget(floor)))(*args)):  # fmt: skip
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), got, want)


def test_a_derivative_with_a_policy_of_its_own_keeps_it() -> None:
    """The budget of the product is for its own derivative, not for those inside the function."""
    seen = []

    def inner(w):
        def policy(prim, *_, **__):
            seen.append(prim.name)
            return True

        return jnp.sum(xform.grad(lambda w: jnp.sum(jnp.sin(w @ w)), policy=policy)(w) ** 2)

    args = f32(32, 32), f32(32, 32)
    run = lambda policy: lambda w, v: xform.hvp(inner, (w,), (v,), policy=policy)
    default = total(run(None), *args)
    assert total(run(policies.budget(default)), *args) <= default
    assert "cos" in seen


def test_a_product_inside_a_planned_step() -> None:
    """The step has a budget, and the product in it has one of its own."""
    small = policies.budget(int(0.8 * total(product(None), *WS)))

    def step(v, w, x):
        gradient = xform.grad(loss, argnums=(0, 1, 2))(v, w, x)
        image = product(small)(v, w, x)
        return jax.tree.map(lambda g, i: g + i, gradient, image)

    args = values()
    planned = xform.jit(step, policies.budget("100 MiB"))
    want = jax.jit(step)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
                 planned(*args), want)  # fmt: skip
    assert len(planned.plan) == 1


def test_a_jitted_function_in_a_product() -> None:
    inner = xform.jit(loss)
    run = lambda *xs: xform.hvp(inner, xs, xs, policy=policies.budget("100 MiB"))
    args = values()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
                 run(*args), jax.jit(product(None))(*args))  # fmt: skip


def test_a_product_under_vmap_and_with_closures() -> None:
    args = values()
    v, w, x = args
    run = lambda x: xform.hvp(lambda v: loss(v, w, x), (v,), (v,), policy=policies.budget("64 MiB"))
    plain = lambda x: xform.hvp(lambda v: loss(v, w, x), (v,), (v,))
    xs = x.reshape(4, 256, 64)
    got = jax.jit(jax.vmap(run))(xs)
    np.testing.assert_allclose(got, jax.jit(jax.vmap(plain))(xs), rtol=1e-4, atol=1e-7)


def test_a_function_without_a_derivative_to_plan() -> None:
    constant = lambda w: jnp.float32(1.0)
    w = jnp.ones((8, 8))
    got = xform.hvp(constant, (w,), (w,), policy=policies.budget("1 MiB"))
    assert not got.any()


def test_an_array_that_is_the_point_and_the_direction_counts_once() -> None:
    w, x = jnp.ones((256, 256)) / 256, jnp.ones((16, 256)) / 16
    f = lambda w: jnp.sum(jnp.sin(x @ w) ** 2)
    with pytest.raises(BudgetInfeasible) as same:
        xform.hvp(f, (w,), (w,), policy=policies.budget("1 KiB"))
    with pytest.raises(BudgetInfeasible) as other:
        xform.hvp(f, (w,), (w + 0,), policy=policies.budget("1 KiB"))
    assert same.value.floor_bytes == other.value.floor_bytes - w.nbytes
    got = xform.hvp(f, (w,), (w,), policy=policies.budget(same.value.floor_bytes))
    np.testing.assert_allclose(got, xform.hvp(f, (w,), (w,)), rtol=1e-5)
