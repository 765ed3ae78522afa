"""No plan within a budget recomputes less than the bound."""

import jax.numpy as jnp
import pytest
from jax import lax

import xform
from xform import policies

W, X = jnp.ones((6, 32, 32)) / 33, jnp.ones((64, 32))


def layer(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) @ w.T)


def unrolled(w, x):
    for i in range(6):
        x = layer(x, w[i])
    return jnp.sum(x**2)


def scanned(w, x):
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2)


def branched(w, x):
    twice = lambda x, w: layer(layer(x, w), w)

    def step(x, w):
        x = lax.cond(jnp.sum(x) > 0, layer, twice, x, w)
        return lax.cond(jnp.sum(x) > 1, twice, layer, x, w), None

    return jnp.sum(lax.scan(step, x, w)[0] ** 2)


@pytest.mark.parametrize("of", ["saved", "peak"])
@pytest.mark.parametrize("f", [unrolled, scanned, branched])
def test_the_lower_bound_never_exceeds_the_recomputed_flops(f, of: str) -> None:
    default = xform.plan(f, W, X, verify=False)
    most = default.saved_bytes if of == "saved" else default.predicted_bytes
    assert default.least_flops is None
    bounds = []
    for part in (1.0, 0.97, 0.94, 0.9) if of == "peak" else (1.0, 0.9, 0.8, 0.7):
        policy = policies.budget(int(part * most), of=of)
        made = xform.plan(f, W, X, policy=policy, verify=False)
        assert made.least_flops is not None
        assert 0 <= made.least_flops <= made.recompute_flops
        bounds.append(made.least_flops)
        if of == "saved" and f is unrolled:
            # A value is saved completely or not at all, so the gap is less than a product.
            assert made.recompute_flops - made.least_flops <= 2 * 64 * 32 * 32
    assert bounds == sorted(bounds)
    assert bounds[0] == 0


def test_a_plan_prints_its_lower_bound_only_under_a_budget() -> None:
    default = xform.plan(unrolled, W, X, verify=False)
    assert "planned in" in str(default)
    assert "within this budget" not in str(default)
    policy = policies.budget(int(0.7 * default.saved_bytes), of="saved")
    assert "within this budget)" in str(xform.plan(unrolled, W, X, policy=policy, verify=False))
