"""ResNet, ViT and U-Net: shapes, and gradients equal to JAX's."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xform
from models.nets.presets import PRESETS, abstract, parameter_count
from models.nets.resnet import ResNetConfig
from models.nets.unet import UNetConfig
from models.nets.vit import ViTConfig
from tests.models.nets.sizes import drawn

SMALL: dict[str, tuple[Any, int]] = {
    "resnet": (ResNetConfig(4, (4, 8), (1, 1), 3, bottleneck=False, small_pictures=True), 8),
    "vit": (ViTConfig(8, 4, 8, 2, 2, 12, 3, dropout=0.1, query_chunk_size=2), 8),
    "unet": (UNetConfig(3, (4, 6), 3), 8),
}


def images(side: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (2, side, side, 3))


@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_those_of_jax(name: str) -> None:
    config, side = SMALL[name]
    graphdef, params, rest = nnx.split(drawn(config), nnx.Param, ...)

    def run(transform: Any) -> Any:
        model = lambda params: nnx.merge(graphdef, params, rest, copy=True)
        loss = lambda params: jnp.mean(jnp.sin(model(params)(images(side))))
        return jax.jit(transform(loss))(params)

    found, expected = run(xform.value_and_grad), run(jax.value_and_grad)
    chex.assert_trees_all_close(found, expected, rtol=1e-3, atol=1e-6)


def test_the_unet_has_as_many_parameters_as_the_one_that_is_widely_used() -> None:
    config = dataclasses.replace(PRESETS["unet"], channels=3, classes=1)
    assert parameter_count(abstract(config)) == 31_037_633


def test_norms_gather_statistics_and_use_them_after_eval() -> None:
    config, side = SMALL["unet"]
    model = drawn(config)
    before = model.down[0].first.norm.mean[...]
    forward = nnx.jit(lambda model: model(images(side)))
    trained = forward(model)
    assert not np.allclose(before, model.down[0].first.norm.mean[...])
    model.eval()
    assert not np.allclose(trained, forward(model), atol=1e-3)


def test_dropout_is_by_key() -> None:
    graphdef, params = nnx.split(drawn(SMALL["vit"][0]))
    run = jax.jit(lambda key: nnx.merge(graphdef, params)(images(8), key=key))
    one, same, other = (run(jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)
