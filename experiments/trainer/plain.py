"""A training step as the guides of Flax and Optax write it: nothing of xform decides it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.nets.decoder import DecoderConfig
from models.nets.presets import abstract
from models.train.optim import OptimConfig, optimizer

State = tuple[Any, optax.OptState]  # parameters, and the optimizer's


def compile_plain(
    model: DecoderConfig, optim: OptimConfig, state: Any, tokens: Any, *, chunk: int | None
) -> jax.stages.Compiled:
    """Compile the step, which reuses the memory of the state that it is given.

    Args:
      model: sizes of the decoder.
      optim: settings of the optimizer: AdamW behind clipping, on a warmup and cosine schedule.
      state: parameters and the optimizer's state, or their types.
      tokens: integers `[batch, window + 1]`, or their type.
      chunk: how many positions of a sequence have their logits in memory at once; None for all.
    """
    graphdef = nnx.graphdef(abstract(model))
    transform = optimizer(optim)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params).loss(tokens.astype(jnp.int32), chunk=chunk)

    def step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return jax.jit(step, donate_argnums=0).lower(state, tokens).compile()
