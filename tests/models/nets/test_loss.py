"""The loss in chunks equals the loss, in the memory of one chunk."""

from typing import Any

import chex
import jax
import numpy as np
import pytest

import xform
from models.nets.loss import cross_entropy

TRANSFORMS = {"jax": jax.value_and_grad, "xform": xform.value_and_grad}


def inputs(tokens: int = 11, vocab: int = 23) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (2, tokens, 8))
    kernel = jax.random.normal(keys[1], (8, vocab))
    targets = jax.random.randint(keys[2], (2, tokens), 0, vocab)
    return hidden, kernel, targets, jax.random.bernoulli(keys[3], 0.7, (2, tokens))


def test_the_loss_is_that_of_the_formula() -> None:
    hidden, kernel, targets, weights = (np.asarray(x) for x in inputs())
    logits = hidden.astype(np.float64) @ kernel
    rows, places = np.indices(targets.shape)
    each = np.log(np.exp(logits).sum(-1)) - logits[rows, places, targets]
    for chunk in (None, 4, 100):
        found = cross_entropy(*inputs(), chunk=chunk)
        np.testing.assert_allclose(found, (each * weights).sum() / weights.sum(), rtol=1e-5)
        np.testing.assert_allclose(
            cross_entropy(*inputs()[:3], chunk=chunk), each.mean(), rtol=1e-5
        )
        squares = np.log(np.exp(logits).sum(-1)) ** 2
        found = cross_entropy(*inputs()[:3], chunk=chunk, z=0.1)
        np.testing.assert_allclose(found, (each + 0.1 * squares).mean(), rtol=1e-5)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_value_and_gradient_in_chunks_are_those_of_the_whole(name: str) -> None:
    def run(transform: Any, chunk: int | None) -> Any:
        loss = lambda hidden, kernel: cross_entropy(hidden, kernel, *inputs()[2:], chunk=chunk)
        return jax.jit(transform(loss, (0, 1)))(*inputs()[:2])

    expected = run(jax.value_and_grad, None)
    chex.assert_trees_all_close(run(TRANSFORMS[name], 4), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_logits_never_exist_whole(name: str) -> None:
    tokens, vocab = 256, 4096
    temp: dict[int | None, int] = {}
    for chunk in (None, 16):
        loss = lambda h, k, t, w, chunk=chunk: cross_entropy(h, k, t, w, chunk=chunk)
        gradient = jax.jit(TRANSFORMS[name](loss, (0, 1)))
        compiled = gradient.lower(*inputs(tokens, vocab)).compile()
        temp[chunk] = compiled.memory_analysis().temp_size_in_bytes
    logits = 2 * tokens * vocab * 4
    assert temp[None] > logits / 2
    assert temp[16] < logits / 4
