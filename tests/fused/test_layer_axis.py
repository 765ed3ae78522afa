"""An update runs in the loop over layers if it treats each layer on its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import xform
from tests.fused.test_fused_update import assert_close, run, separate

LAYERS = 3
decay = jnp.array([0.1, 0.2, 0.3]).reshape(LAYERS, 1, 1)
key = jax.random.key(1)

# Updates of a stack, as functions of gradient, state and parameter.
BY_LAYER: dict[str, Callable[..., Any]] = {
    "sum": lambda g, m, p: -0.1 * (g + 0.5 * m),
    "sign": lambda g, m, p: -0.1 * jnp.sign(g - m),
    "where": lambda g, m, p: jnp.where(g > m, -0.1 * g, p),
    "clip": lambda g, m, p: -jnp.clip(g, -0.01, 0.01),
    "rate of each layer": lambda g, m, p: -decay * g,
    "rate by index": lambda g, m, p: -g * jnp.arange(float(LAYERS))[:, None, None],
    "rate from a column": lambda g, m, p: -g * jnp.arange(4.0)[None, None, :],
    "norm of each layer": lambda g, m, p: -g / (1 + jnp.sum(g**2, axis=(1, 2), keepdims=True)),
    "largest of each row": lambda g, m, p: -g / (1 + jnp.max(jnp.abs(g), axis=2, keepdims=True)),
    "flat layers": lambda g, m, p: -0.1 * jnp.sin(g.reshape(LAYERS, -1)).reshape(g.shape),
    "transposed": lambda g, m, p: -0.1 * jnp.exp(g.transpose(2, 0, 1)).transpose(1, 2, 0),
    "noise": lambda g, m, p: -0.1 * (g + jax.random.normal(key, g.shape)),
    "converted": lambda g, m, p: -g.astype(jnp.bfloat16).astype(g.dtype),
}
OVER_LAYERS: dict[str, Callable[..., Any]] = {
    "mean over layers": lambda g, m, p: -0.1 * (g - jnp.mean(g, axis=0)),
    "norm of the stack": lambda g, m, p: -g / (1 + jnp.sqrt(jnp.sum(g**2))),
    "cumulative sum": lambda g, m, p: -0.1 * jnp.cumsum(g, axis=0),
    "reversed": lambda g, m, p: -0.1 * g[::-1],
    "next layer": lambda g, m, p: -0.1 * jnp.roll(g, 1, axis=0),
    "one layer": lambda g, m, p: -0.1 * g[0],
    "sorted": lambda g, m, p: -0.1 * jnp.sort(g, axis=0),
    "merged": lambda g, m, p: -0.1 * jnp.sin(g.reshape(-1)).reshape(g.shape),
    "product over layers": lambda g, m, p: -0.1 * jnp.einsum("lij,kij->kij", g, g),
    "another parameter": lambda g, m, p: -0.1 * g * jnp.sum(p),
}


def optimizer_of(update: Callable[..., Any]) -> optax.GradientTransformation:
    def step(grads: Any, state: Any, params: Any = None) -> Any:
        updates = jax.tree.map(update, grads, state, params)
        return updates, jax.tree.map(lambda m, g: 0.5 * m + g, state, grads)

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), step)


def loss(w: Any, x: Any) -> Any:
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
    return jnp.sum(h**2)


def start_of(optimizer: optax.GradientTransformation) -> tuple[Any, Any, Any]:
    w = jax.random.normal(jax.random.key(0), (LAYERS, 4, 4)) / 2
    return w, optimizer.init(w), jnp.ones((2, 4))


@pytest.mark.parametrize("name", BY_LAYER)
def test_an_update_by_layer_runs_in_the_loop(name: str) -> None:
    optimizer = optimizer_of(BY_LAYER[name])
    start, fused = start_of(optimizer), xform.fused_update(loss, optimizer)
    (row,) = fused.where(*start).rows
    assert (row.place, row.reason) == ("backward loop", "")
    assert row.gradient_bytes == 4 * 4 * 4
    assert_close(run(jax.jit(fused), *start), run(jax.jit(separate(loss, optimizer)), *start))


@pytest.mark.parametrize("name", OVER_LAYERS)
def test_an_update_over_layers_follows_the_loop(name: str) -> None:
    optimizer = optimizer_of(OVER_LAYERS[name])
    start, fused = start_of(optimizer), xform.fused_update(loss, optimizer)
    (row,) = fused.where(*start).rows
    assert row.place == "after the backward loop"
    assert row.reason
    assert row.gradient_bytes == LAYERS * 4 * 4 * 4
    assert_close(run(jax.jit(fused), *start), run(jax.jit(separate(loss, optimizer)), *start))


@pytest.mark.parametrize(
    "options", [{"reverse": True}, {"unroll": 2}, {"reverse": True, "unroll": 3}]
)
def test_loops_in_both_directions_and_unrolled(options: Any) -> None:
    def loss(w: Any, x: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w, **options)
        return jnp.sum(h**2)

    optimizer = optax.adam(0.1)
    start, fused = start_of(optimizer), xform.fused_update(loss, optimizer)
    assert fused.where(*start).rows[0].place == "backward loop"
    assert_close(run(jax.jit(fused), *start), run(jax.jit(separate(loss, optimizer)), *start))


def test_a_stack_of_one_layer() -> None:
    optimizer = optax.adam(0.1)
    w = jnp.eye(4)[None]
    start = w, optimizer.init(w), jnp.ones((2, 4))
    fused = xform.fused_update(loss, optimizer)
    assert fused.where(*start).rows[0].reason == "it has one layer"
    assert_close(run(jax.jit(fused), *start), run(jax.jit(separate(loss, optimizer)), *start))


def test_states_that_need_each_other_are_computed_before_one_is_written() -> None:
    """Each new value reads the old value of the other, so no order of writes is right."""

    def update(g: Any, state: Any, p: Any = None) -> Any:
        a, b = state
        return -0.1 * (a + b), (b + g, a - g)

    optimizer = optax.GradientTransformation(lambda p: (jnp.ones_like(p), 2 * p), update)
    start, fused = start_of(optimizer), xform.fused_update(loss, optimizer)
    ours = run(jax.jit(fused), *start)
    assert_close(ours, run(jax.jit(separate(loss, optimizer)), *start))


def test_a_parameter_may_not_move_to_another_leaf() -> None:
    """The new state is the gradient, at the place of another value of another type."""

    def update(g: Any, state: Any, p: Any = None) -> Any:
        return -0.1 * g, {"last": g.astype(jnp.bfloat16)}

    optimizer = optax.GradientTransformation(lambda p: {"last": p}, update)
    start, fused = start_of(optimizer), xform.fused_update(loss, optimizer)
    (row,) = fused.where(*start).rows
    assert "another type" in row.reason
    ours = run(jax.jit(fused), *start, n=1)
    assert_close(ours, run(jax.jit(separate(loss, optimizer)), *start, n=1))
