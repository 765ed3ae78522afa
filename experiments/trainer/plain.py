"""A training step as the guides of Flax and Optax write it, without xform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.nets.presets import abstract
from models.train.optim import OptimConfig, optimizer

# Parameters, the model's other state (statistics of batch norms), and the optimizer's state.
State = tuple[Any, Any, optax.OptState]
# A function of parameters, other state and a batch: the loss, and the new other state.
Loss = Callable[[Any, Any, Any], tuple[jax.Array, Any]]


def of_text(model: Any, chunk: int | None) -> Loss:
    """Return the mean cross-entropy of integers `[batch, window + 1]`, as a function.

    `chunk` is how many positions of a sequence have their logits in memory at once; None for all.
    """
    graphdef = nnx.graphdef(abstract(model))

    def loss(params: Any, rest: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return nnx.merge(graphdef, params).loss(tokens.astype(jnp.int32), chunk=chunk), rest

    return loss


def of_pictures(model: Any) -> Loss:
    """Return the mean cross-entropy of images `[batch, height, width, channels]`, as a function."""
    graphdef = nnx.graphdef(abstract(model))

    def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
        merged = nnx.merge(graphdef, params, statistics, copy=True)
        logits = merged(batch["image"].astype(jnp.float32) / 127.5 - 1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses), nnx.state(merged, nnx.BatchStat)

    return loss


def compile_plain(loss: Loss, optim: OptimConfig, state: State, batch: Any) -> jax.stages.Compiled:
    """Compile the step, which reuses the memory of its state.

    Args:
      loss: of the model.
      optim: settings of the optimizer: AdamW with clipping, on a warmup and cosine schedule.
      state: the first state, or its types.
      batch: a batch, or its types.
    """
    transform = optimizer(optim)

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        params, rest, opt_state = state
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, batch)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), rest, opt_state), value

    return jax.jit(step, donate_argnums=0).lower(state, batch).compile()
