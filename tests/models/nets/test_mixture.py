"""The mixture of experts against every expert run on every token."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.nets.mixture import Mixture, Routing


def test_mixture_output_is_the_weighted_sum_of_the_top_two_experts() -> None:
    mixture = Mixture(6, 10, 5, 2, dtype=None, rngs=nnx.Rngs(0))
    x = 20 * jax.random.normal(jax.random.key(1), (2, 7, 6))
    found, routing = nnx.jit(lambda mixture, x: mixture(x))(mixture, x)

    weights = jax.nn.softmax(x @ mixture.router.kernel[...])
    gate, up = (jnp.einsum("btd,edf->btef", x, w[...]) for w in (mixture.gate, mixture.up))
    each = jnp.einsum("btef,efd->bted", jax.nn.silu(gate) * up, mixture.down[...])
    second = jnp.sort(weights)[..., -2:-1]
    chosen = jnp.where(weights >= second, weights, 0)
    chosen /= chosen.sum(-1, keepdims=True)
    expected = jnp.einsum("bte,bted->btd", chosen, each)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(routing.shares.sum(-1), np.ones(2), rtol=1e-6)


def test_imbalance_is_least_where_all_are_used_alike() -> None:
    even = Routing(jnp.full((3, 2, 4), 1 / 4), jnp.full((3, 4), 1 / 4))
    one = jnp.zeros((3, 4)).at[:, 0].set(1.0)
    assert even.imbalance() == 2
    assert Routing(jnp.stack([one, one], 1), one).imbalance() == 8
