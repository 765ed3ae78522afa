"""A layer that runs for a few tokens at a time is the whole layer, on one device and on many."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

import xform
from models.nets.llama import LlamaConfig
from models.nets.perceptron import GatedPerceptron
from models.nets.tiles import by_tokens
from tests.models.nets.sizes import SIZES

X = jax.random.normal(jax.random.key(1), (2, 24, 8))


def gradients(chunk: int) -> Any:
    layer = GatedPerceptron(8, 32, dtype="float32", rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(by_tokens(nnx.merge(graphdef, params), x, chunk)))

    return jax.jit(xform.value_and_grad(loss, (0, 1)))(nnx.to_pure_dict(params), X)


@pytest.mark.parametrize("chunk", [1, 5, 8, 23, 24, 100])
def test_values_and_gradients_are_those_of_the_whole(chunk: int) -> None:
    chex.assert_trees_all_close(gradients(chunk), gradients(0), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(jax.device_count() < 8, reason="a mesh of eight devices")
@pytest.mark.parametrize("chunk", [2, 4])
def test_devices_that_share_a_sequence(chunk: int) -> None:
    expected, sizes = gradients(0), {"data": 2, "context": 4}
    with jax.set_mesh(jax.make_mesh((2, 4), tuple(sizes), (AxisType.Auto,) * 2)):
        chex.assert_trees_all_close(gradients(chunk), expected, rtol=1e-5, atol=1e-6)


def test_the_hidden_values_of_few_tokens_are_in_memory() -> None:
    def temporary(chunk: int) -> int:
        x, w = jnp.zeros((1, 4096, 8)), jnp.zeros((8, 512))
        f = lambda w, x: jnp.sum(by_tokens(lambda x: jnp.tanh(x @ w) @ w.T, x, chunk) ** 2)
        compiled: Any = jax.jit(xform.grad(f)).lower(w, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(256) < 0.2 * temporary(0)


def test_experts_have_no_such_setting() -> None:
    with pytest.raises(ValueError, match="for models without experts"):
        LlamaConfig(**SIZES, experts=4, mlp_chunk_size=8)
    assert LlamaConfig(**SIZES, mlp_chunk_size=8).mlp_chunk_size == 8
