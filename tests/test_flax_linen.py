"""Linen works with the plain transforms, because its `apply` is a pure function."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import xform
from tests.nnx import X, same

pytestmark = pytest.mark.usefixtures("quick_compilation")


class Linen(nn.Module):
    """A Linen module with scanned and remat-marked blocks, dropout and statistics."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        block = nn.remat(LinenBlock, static_argnums=(2,))
        stack = nn.scan(
            block, variable_axes={"params": 0, "batch_stats": 0}, in_axes=nn.broadcast,
            split_rngs={"params": True, "dropout": True}, length=2,
        )  # fmt: skip
        x, _ = stack(name="stack")(x, train)
        return nn.Dense(2)(x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> Any:
        y = nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))
        return x + nn.Dropout(0.5, deterministic=not train)(jnp.sin(y)), None


def test_linen_apply_is_pure() -> None:
    model, key = Linen(), jax.random.key(1)
    variables = jax.jit(model.init)({"params": key, "dropout": key}, X)

    def f(params: Any, stats: Any, x: jax.Array) -> Any:
        y, updates = model.apply(
            {"params": params, "batch_stats": stats}, x, rngs={"dropout": key},
            mutable=["batch_stats"],
        )  # fmt: skip
        return jnp.mean(y**2), updates["batch_stats"]

    args = variables["params"], variables["batch_stats"], X
    expected = jax.jit(jax.value_and_grad(f, has_aux=True))(*args)
    same(jax.jit(xform.value_and_grad(f, has_aux=True))(*args), expected)
