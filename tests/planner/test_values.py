"""A plan never changes a value: random programs under random budgets, prices and saved sets."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from tests.fuzz.evaluate import Machine
from tests.fuzz.generate import inputs, sample
from tests.fuzz.source import function
from xform import errors, policies

# 31: a loop that starts from a literal.
QUICK, SLOW = [*range(5), 31], [n for n in range(5, 300) if n != 31]


def gradient(f, policy, xs) -> list[np.ndarray] | None:
    """Return cotangents of all inputs, operation by operation; None if no plan fits."""

    def pulled(*xs):
        y, pull = xform.vjp(f, *xs, policy=policy)
        ones = jax.tree.map(lambda v: jnp.ones_like(v), y)
        cts = jax.tree.map(
            lambda one, v: one if jnp.issubdtype(v.dtype, np.inexact)
            else np.zeros(v.shape, jax.dtypes.float0), ones, y,
        )  # fmt: skip
        return [ct for ct in pull(cts) if ct.dtype != jax.dtypes.float0]

    try:
        prog = jax.make_jaxpr(pulled)(*xs)
    except errors.BudgetInfeasible:
        return None
    return Machine().run(prog, xs)


def saved_at_random(seed: int):
    """Return a policy that saves about half of the primitives."""

    def policy(prim, *avals, **params) -> bool:
        text = f"{prim.name} {[a.str_short() for a in avals]} {seed}"
        return zlib.crc32(text.encode()) % 2 == 0

    return policy


def check(seed: int) -> None:
    s = sample(seed)
    f, xs = function(s.source), inputs(s.seed, s.types)
    random = np.random.default_rng(seed)
    try:
        want = gradient(f, policies.save_everything, xs)
    except (TypeError, NotImplementedError):  # an integer program, or one that JAX cannot batch
        return
    most = xform.residuals(f, *xs, policy=policies.save_everything).total_bytes
    ways = [policies.budget(int(random.uniform(0, 1) * most), of="saved") for _ in range(2)]
    ways += [policies.MinCut(price, price) for price in 10 ** random.uniform(-6, 1, 2)]
    ways += [policies.min_cut, policies.save_nothing, saved_at_random(seed)]
    for policy in ways:
        got = gradient(f, policy, xs)
        if got is None:
            continue
        for a, b in zip(got, want, strict=True):
            scale = max(float(np.max(np.abs(b), initial=0.0)), 1e-300)
            assert np.allclose(a / scale, b / scale, rtol=0, atol=1e-12, equal_nan=True), policy


@pytest.mark.filterwarnings("ignore:.*which no value has")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", QUICK)
def test_a_plan_never_changes_a_value(seed: int) -> None:
    check(seed)


@pytest.mark.filterwarnings("ignore:.*which no value has")
@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", SLOW)
def test_a_plan_never_changes_a_value_of_many(seed: int) -> None:
    check(seed)


@pytest.mark.usefixtures("x64")
def test_with_sharded_arguments_on_eight_devices() -> None:
    mesh = jax.make_mesh((8,), ("d",), (jax.sharding.AxisType.Auto,))
    put = lambda x, *spec: jax.device_put(
        x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    )
    ws = [put(np.cos(np.arange(64.0) + i).reshape(8, 8) / 3, None, "d") for i in range(4)]
    x = put(np.sin(np.arange(128.0)).reshape(16, 8), "d", None)

    def loss(ws, x):
        for w in ws:
            x = x + jnp.tanh(jnp.sin(x @ w) @ w)
        return jnp.sum(x**2)

    want = jax.jit(jax.grad(loss))(ws, x)
    most = xform.residuals(loss, ws, x, argnums=0).total_bytes
    for part in (1.0, 0.6, 0.3):
        got = jax.jit(xform.grad(loss, policy=policies.budget(int(part * most), of="saved")))(ws, x)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def test_bfloat16_gradients_under_budgets_are_as_accurate_as_jax_remat() -> None:
    """As in JAX's own remat: both differ from no remat by the rounding of recomputed values."""
    w = jnp.asarray(np.cos(np.arange(64.0)).reshape(8, 8) / 3, jnp.bfloat16)
    x = jnp.asarray(np.sin(np.arange(64.0)).reshape(8, 8), jnp.bfloat16)
    f = lambda w, x: jnp.sum(jnp.tanh(jnp.sin(x @ w) @ w) @ w).astype(jnp.float32)
    exact = jax.grad(f)(w.astype(jnp.float32), x.astype(jnp.float32))
    far = lambda g: float(jnp.max(jnp.abs(g.astype(jnp.float32) - exact)))
    remat = far(jax.jit(jax.grad(jax.checkpoint(f)))(w, x))
    for n in (0, 128, 256):
        ours = jax.jit(xform.grad(f, policy=policies.budget(n, of="saved")))(w, x)
        assert far(ours) <= 2 * remat + 1e-2
