"""Attention a few queries at a time equals full attention, and never holds all scores in memory."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from models.nets.attention import attend
from models.nets.rotary import Rotary, rotate

B, T, H, K, E = 2, 11, 4, 2, 8


def inputs(tokens: int = T) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, tokens, H, E), (B, tokens, K, E), (B, tokens, K, E)
    return tuple(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))


def by_hand(query: Any, key: Any, value: Any, seen: np.ndarray) -> np.ndarray:
    """Compute it with all scores, in float64, one head at a time."""
    out = np.zeros(query.shape)
    for b, h in np.ndindex(B, H):
        q, k, v = (np.asarray(x[b, :, i], np.float64) for x, i in
                   ((query, h), (key, h * K // H), (value, h * K // H)))  # fmt: skip
        weights = np.where(seen[b], np.exp(q @ k.T / E**0.5), 0)
        out[b, :, h] = weights @ v / weights.sum(-1, keepdims=True)
    return out


SEGMENTS = np.array([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
CAUSAL = np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, T, T))
CASES: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "causal": ({"causal": True}, CAUSAL),
    "all": ({"causal": False}, np.ones((B, T, T), bool)),
    "packed": (
        {"causal": True, "segments": jnp.asarray(SEGMENTS)},
        CAUSAL & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]),
    ),
    "local": ({"causal": True, "window": 3}, CAUSAL & ~np.tril(CAUSAL, -3)),
    "placed": (
        {"causal": True, "positions": jnp.full((B, T), 5)},
        np.broadcast_to(np.arange(T) <= 5, (B, T, T)),
    ),
}


@pytest.mark.parametrize("chunk", [4, T], ids=["chunks", "whole"])
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_formula(case: str, chunk: int) -> None:
    options, seen = CASES[case]
    found = attend(*inputs(), **options, chunk=chunk)
    np.testing.assert_allclose(found, by_hand(*inputs(), seen), rtol=1e-4, atol=1e-5)


def test_gradients_of_chunks_are_those_of_the_whole() -> None:
    def gradient(transform: Any, chunk: int) -> Any:
        options, _ = CASES["packed"]
        loss = lambda q, k, v: jnp.sum(jnp.sin(attend(q, k, v, **options, chunk=chunk)))
        return jax.jit(transform(loss, (0, 1, 2)))(*inputs())

    expected = gradient(jax.grad, T)
    for transform in (jax.grad, xform.grad):
        chex.assert_trees_all_close(gradient(transform, 4), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("transform", [jax.grad, xform.grad], ids=["jax", "xform"])
def test_scores_are_never_all_in_memory(transform: Any) -> None:
    tokens = 256
    loss = lambda q, k, v: jnp.sum(attend(q, k, v, causal=True, chunk=8))
    compiled = jax.jit(transform(loss, (0, 1, 2))).lower(*inputs(tokens)).compile()
    scores = B * H * tokens * tokens * 4
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 3


def test_rotary_scores_depend_on_distance_alone() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, E))
    places = jnp.arange(9)[None]
    angles = Rotary(100.0).angles(places, E)
    query, key = (rotate(jnp.broadcast_to(v, (1, 9, 1, E)), angles)[0, :, 0] for v in x)
    scores = query @ key.T
    for offset in (0, 3):
        diagonal = jnp.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, jnp.full_like(diagonal, diagonal[0]), rtol=1e-4)
    assert not np.allclose(scores[0], scores[0, 0], rtol=1e-2)
