"""The value and the gradient of a loss, compiled as a step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import xform
from xform.errors import NotScalar
from xform.steps.gradient import GradientStep

X = jnp.sin(jnp.arange(64.0 * 32).reshape(64, 32))


class Layers(nnx.Module):
    """Two layers, and a counter, which is not differentiated."""

    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=nnx.Rngs(i)) for i in range(2)])
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] += 1
        for layer in self.layers:
            x = jnp.sin(layer(x))
        return x


def module_loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def scaled(w: jax.Array, x: jax.Array, how: dict[str, Any]) -> jax.Array:
    assert how["name"] == "sum"
    return how["scale"] * jnp.sum(jnp.tanh(x @ w) ** 2)


def test_modules_shardings_and_donation_count_as_in_the_compiled_gradient() -> None:
    """It takes two and a half seconds: five programs are compiled, two of them for two devices."""
    specs = {"mesh": {"data": 2}, "in_specs": (PartitionSpec(), PartitionSpec("data"))}
    gradient = xform.flax.value_and_grad(module_loss)
    for target, options in (("cpu", {}), ("cpu:2", specs)):
        (entry,) = xform.compare(
            module_loss, Layers(), X, policies=[None], targets=[target], **options
        )
        want = xform.memory_analysis(gradient, Layers(), X, target=target, **options)
        assert entry.report.total_bytes == pytest.approx(want.total_bytes, rel=0.01)
        assert entry.report.description.arguments == want.description.arguments
    (entry,) = xform.compare(module_loss, Layers(), X, policies=[None], donate_argnums=0)
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(Layers(), nnx.Param)))
    assert weights <= entry.report.alias_bytes <= weights + 4


def test_other_values_than_arrays_are_static_and_budgets_share_a_trace() -> None:
    calls: list[int] = []

    def counted(*args: Any) -> jax.Array:
        calls.append(0)
        return scaled(*args)

    w, how = X[:32], {"name": "sum", "scale": 2.0, "by": len}
    step = GradientStep(counted)
    first = step.under("budget:1MiB").lower(w, X, how).plan
    second = step.under("budget:900KiB").lower(w, X, how).plan
    assert (first.compiles, second.compiles, len(calls)) == (1, 0, 1)
    value, gradient = step(w, X, how)
    np.testing.assert_allclose(gradient, jax.grad(lambda w: scaled(w, X, how))(w), rtol=1e-5)
    assert value.shape == ()
    step.under(None).lower(w, X, {**how, "name": "sum", "by": max})
    assert len(calls) == 3


def test_a_function_without_a_scalar_is_refused() -> None:
    with pytest.raises(NotScalar, match=r"xform\.jit"):
        xform.compare(lambda x: jnp.sin(x), X, policies=[None])
