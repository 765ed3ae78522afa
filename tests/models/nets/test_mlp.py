"""The residual MLP: layouts agree, and gradients with every policy are JAX's."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import xform
from models.nets.mlp import MLP, MLPConfig

POLICIES = ("min_cut", "save_everything", "save_dots", "save_dots_with_no_batch_dims",
            "save_only_these_names:mlp_hidden", "save_nothing", "saved:1kB")  # fmt: skip
MICRO = MLPConfig(inputs=6, width=8, hidden=16, outputs=3, depth=3)


def loss(model: MLP, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (5, MICRO.inputs))


def test_scanned_equals_unrolled(x: jax.Array) -> None:
    scanned = MLP(MICRO, rngs=nnx.Rngs(0))
    unrolled = MLP(dataclasses.replace(MICRO, scan_layers=False), rngs=nnx.Rngs(0))
    chex.assert_trees_all_close(scanned(x), unrolled(x), rtol=1e-6)
    each = [nnx.to_pure_dict(nnx.state(module)) for module in unrolled.layers.each]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    chex.assert_trees_all_equal(stacked, nnx.to_pure_dict(nnx.state(scanned.layers.each)))


@pytest.mark.parametrize(
    "scan", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scanned", "unrolled"]
)
def test_gradients_at_every_policy_are_those_of_jax(scan: bool, x: jax.Array) -> None:
    config = dataclasses.replace(MICRO, scan_layers=scan)
    plain = MLP(config, rngs=nnx.Rngs(0))
    expected = nnx.jit(nnx.grad(loss))(plain, x)
    for policy in POLICIES:
        graphdef, _ = nnx.split(MLP(dataclasses.replace(config, remat=policy), rngs=nnx.Rngs(0)))
        marked = nnx.merge(graphdef, nnx.state(plain), copy=True)
        for transform in (xform.flax.grad, nnx.grad):
            actual = nnx.jit(transform(loss))(marked, x)
            chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-7)


def test_bf16_computes_in_bf16_and_keeps_f32_parameters(x: jax.Array) -> None:
    model = MLP(dataclasses.replace(MICRO, dtype="bfloat16"), rngs=nnx.Rngs(0))
    value, grads = xform.flax.value_and_grad(loss)(model, x)
    chex.assert_type([value, *jax.tree.leaves((nnx.state(model), grads))], jnp.float32)
    assert model.enter(x).dtype == jnp.bfloat16
