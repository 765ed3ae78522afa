"""Regions with `min_cut` or a budget under JAX's own transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import xform
from tests import flags
from tests.parameters import slow
from tests.reference import close
from xform import policies

pytestmark = pytest.mark.usefixtures("x64")

WS = np.cos(np.arange(3 * 36.0)).reshape(3, 6, 6) / 3
X = np.sin(np.arange(24.0)).reshape(4, 6)


@jax.custom_vjp
def doubled(x):
    """The identity, with twice its cotangent."""
    return x


doubled.defvjp(lambda x: (x, None), lambda _, ct: (2 * ct,))


def layer(x, w):
    h = jnp.tanh(x @ w)
    h = lax.cond(jnp.sum(h) > 0, jnp.sin, jnp.cos, h)
    return x + doubled(jax.nn.gelu(h)) @ w


def unrolled(layer, ws, x):
    for w in ws:
        x = layer(x, w)
    return jnp.sum(x**2)


def scanned(layer, ws, x):
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)


WAYS = [policies.min_cut, policies.budget(400, of="saved"), policies.budget(8, of="saved")]


@pytest.mark.parametrize("policy", slow(WAYS, WAYS[1]))
@pytest.mark.parametrize("f", [unrolled, scanned])
def test_gradients_are_those_without_the_region(f, policy) -> None:
    want = jax.grad(f, (1, 2))(layer, WS, X)
    inside = lambda ws, x: f(xform.remat(layer, policy=policy), ws, x)
    around = xform.remat(lambda ws, x: f(layer, ws, x), policy=policy)
    found = jax.jit(lambda ws, x: [t(g, (0, 1))(ws, x) for t, g in (
        (jax.grad, inside), (jax.grad, around), (xform.grad, inside))])(WS, X)  # fmt: skip
    for got in found:
        close(got, want, 1e-12)
    batched = jax.jit(jax.vmap(jax.grad(inside, 1), (None, 0)))(WS, np.stack([X, 2 * X]))
    close(batched[0], want[1], 1e-12)


def test_jax_saves_matrix_products_that_min_cut_keeps(capsys) -> None:
    f = lambda x, w: jnp.sin(jax.nn.softmax(x @ w) @ w)
    print_saved_residuals(xform.remat(f, policy=policies.min_cut), X, WS[0])
    kept = [line for line in capsys.readouterr().out.splitlines() if "argument" not in line]
    ours = xform.residuals(xform.remat(f, policy=policies.min_cut), X, WS[0])
    rows = [r for r in ours if r.kind == "kept"]
    # JAX saves both products; so does the plan, and a factor of the softmax, which JAX recomputes.
    assert [line.split()[0] for line in kept] == ["f64[4,6]"] * 2
    assert {r.operation for r in rows} >= {"dot_general"}
    assert all(not r.name for r in rows)


@pytest.mark.parametrize("cell", ["none", "remat3"])
def test_jax_saves_checkpoint_named_values_of_an_xform_region(cell: str, capsys) -> None:
    """Under `jax_remat3` a name is an object, and JAX does not ask xform's policy about it."""

    def f(x, ws):
        x = checkpoint_name(jnp.exp(x @ ws[0]), "kept")
        step = lambda x, w: (jnp.cos(checkpoint_name(jnp.sin(x @ w), "kept")), None)
        return lax.scan(step, jnp.sin(x), ws)[0]

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    with flags.under(cell):
        print_saved_residuals(xform.remat(f, policy=policy), X, WS)
    kept = [line for line in capsys.readouterr().out.splitlines() if "argument" not in line]
    assert [line.split()[0] for line in kept] == ["f64[4,6]", f"f64[{len(WS)},4,6]"]


def test_less_is_compiled_with_regions_in_a_loop() -> None:
    ws, x = jnp.zeros((8, 64, 64)), jnp.zeros((256, 64))
    f = lambda x, w: x + jax.nn.gelu(jnp.tanh(x @ w)) @ w
    temp = []
    for g in (f, xform.remat(f, policy=policies.min_cut)):
        step = jax.jit(jax.grad(lambda ws, x, g=g: scanned(g, ws, x)))
        used = step.lower(ws, x).compile().memory_analysis()
        temp.append(used.temp_size_in_bytes)
    assert temp[1] < 0.7 * temp[0]


def test_a_budget_that_is_too_small_is_refused_by_xform_alone() -> None:
    # Callbacks are never recomputed, so something must be saved.
    def f(x):
        scale = jax.pure_callback(np.asarray, x, lax.stop_gradient(x))
        return jnp.sum(scale * jnp.sin(x))

    g = xform.remat(f, policy=policies.budget(1, of="saved"))
    close(jax.grad(g)(X), jax.grad(f)(X), 1e-12)
    with pytest.raises(xform.errors.BudgetInfeasible):
        jax.jit(xform.grad(g))(X)
