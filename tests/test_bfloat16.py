"""In bfloat16 xform's gradients are as far from float32 as those of `jax.checkpoint`.

The guide `docs/guides/bfloat16.md` explains the two distances.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform

LAYERS, WIDTH, ROWS, SEEDS = 4, 64, 64, 6


def perceptron(h: jax.Array, p: Any) -> jax.Array:
    normed = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
    return h + jax.nn.gelu(normed @ p["up"]) @ p["down"]


def attention(h: jax.Array, p: Any) -> jax.Array:
    weights = jax.nn.softmax(h @ (h @ p["up"] @ p["down"]).T / WIDTH**0.5)
    return h + jnp.tanh(weights @ h)


LAYER = {"perceptron": perceptron, "attention": attention}


def model(layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, p: (layer(h, p), None), x, ws)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return loss


def inputs(seed: int) -> tuple[Any, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    up = jax.random.normal(keys[0], (LAYERS, WIDTH, 2 * WIDTH)) / WIDTH**0.5
    down = jax.random.normal(keys[1], (LAYERS, 2 * WIDTH, WIDTH)) / (2 * WIDTH) ** 0.5
    return cast(({"up": up, "down": down}, jax.random.normal(keys[2], (ROWS, WIDTH))), jnp.bfloat16)


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda a: a.astype(dtype), tree)


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(a, np.float64)) for a in jax.tree.leaves(tree)])


@pytest.mark.parametrize("layer", LAYER)
@pytest.mark.parametrize("policy", [None, "save_nothing"])
def test_the_error_in_bfloat16_is_bounded_by_that_of_checkpoint(layer: str, policy: Any) -> None:
    loss = model(LAYER[layer])
    reference = jax.jit(jax.grad(loss))
    checkpoint = jax.jit(jax.grad(model(jax.checkpoint(LAYER[layer]))))
    ours = jax.jit(xform.grad(loss) if policy is None else xform.grad(loss, policy=policy))
    errors = []
    for seed in range(SEEDS):
        args = inputs(seed)
        true = flat(reference(*cast(args, jnp.float32)))
        theirs, mine = flat(checkpoint(*args)), flat(ours(*args))
        errors.append([np.linalg.norm(d) / np.linalg.norm(true)
                       for d in (theirs - true, mine - true, mine - theirs)])  # fmt: skip
    theirs, mine, apart = np.transpose(errors)
    assert theirs.min() > 1e-3, "the model does not round: the bound would say nothing"
    assert np.median(mine / theirs) < 1.1
    assert (mine < 1.25 * theirs).all()
    assert (apart < 2 * theirs).all()


def test_a_derivative_that_is_wrong_by_two_percent_exceeds_the_bound() -> None:
    loss = model(perceptron)
    args = inputs(0)
    true = flat(jax.grad(loss)(*cast(args, jnp.float32)))
    theirs = flat(jax.grad(model(jax.checkpoint(perceptron)))(*args))
    wrong = flat(xform.grad(loss)(*args)) * 1.02
    assert np.linalg.norm(wrong - true) > 1.25 * np.linalg.norm(theirs - true)
