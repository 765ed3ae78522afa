"""LSTM, GRU and the neural ODE: causality, closed forms, and gradients equal to JAX's."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xform
from models.nets.ode import ODEConfig, flow
from models.nets.recurrent import RecurrentConfig
from tests.models.nets.sizes import drawn

SMALL: dict[str, tuple[Any, tuple[int, ...]]] = {
    "lstm": (RecurrentConfig("lstm", 3, 5, depth=2), (2, 7, 3)),
    "gru": (RecurrentConfig("gru", 3, 5), (2, 7, 3)),
    "ode": (ODEConfig(4, 6, 5), (2, 4)),
}


@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_those_of_jax(name: str) -> None:
    config, shape = SMALL[name]
    graphdef, params = nnx.split(drawn(config))
    x = jax.random.normal(jax.random.key(0), shape)
    loss = lambda params, x: jnp.mean(nnx.merge(graphdef, params)(x) ** 2)
    run = lambda transform: jax.jit(transform(loss, (0, 1)))(params, x)
    chex.assert_trees_all_close(run(xform.grad), run(jax.grad), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_later_moment_changes_no_earlier_state(name: str) -> None:
    config, shape = SMALL[name]
    graphdef, params = nnx.split(drawn(config))
    model = jax.jit(lambda x: nnx.merge(graphdef, params)(x))
    x = jax.random.normal(jax.random.key(0), shape)
    changed = np.any(model(x) != model(x.at[:, 4].add(1.0)), axis=(0, 2))
    assert changed.tolist() == [False] * 4 + [True] * 3


def test_a_flow_has_its_closed_form_to_fourth_order() -> None:
    """`dx/dt = cos(t) x` from 1 is `exp(sin t)`."""
    error = lambda steps: abs(
        flow(lambda t, x: jnp.cos(t) * x, 1.0, 2.0, steps) - np.exp(np.sin(2))
    )
    with jax.enable_x64(True):
        assert error(40) < 1e-6
        assert 12 < error(20) / error(40) < 20
