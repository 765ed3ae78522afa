"""Small networks for the tests of this folder."""

from typing import Any

import jax
import jax.numpy as jnp

WIDTH, EXAMPLES = 16, 8


def weights(n: int, gain: float = 2**0.5, seed: int = 0) -> list[Any]:
    """Return weights of layers of one width."""
    keys = jax.random.split(jax.random.key(seed), n)
    return [jax.random.normal(k, (WIDTH, WIDTH)) * gain * WIDTH**-0.5 for k in keys]


def batch(seed: int = 1) -> Any:
    """Return random points."""
    return jax.random.normal(jax.random.key(seed), (EXAMPLES, WIDTH))


def plain(ws: list[Any], x: Any) -> Any:
    """Compute a perceptron of ReLUs."""
    for w in ws:
        x = jax.nn.relu(x @ w)
    return jnp.mean(x**2)


def scanned(ws: Any, x: Any) -> Any:
    """Compute residual layers in a scan, each a remat region."""

    def layer(h: Any, w: Any) -> Any:
        return h + jnp.tanh(h @ w), None

    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2)
