"""Training objectives: the loss of each kind of model on a batch, and other metrics.

A loss is a float32 mean over the batch. It is returned with a dictionary of metrics, which are only
reported. Without `training` there is no dropout and no auxiliary loss term. The caller also puts
the model in evaluation mode then, so that norms use their running statistics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.nets.gpt2 import GPT2Config
from models.nets.llama import LlamaConfig
from models.nets.ode import ODEConfig
from models.nets.recurrent import RecurrentConfig
from models.nets.resnet import ResNetConfig
from models.nets.segments import unpacked
from models.nets.unet import UNetConfig
from models.nets.vit import ViTConfig

# A loss, and metrics that are only reported.
LossAndMetrics = tuple[jax.Array, dict[str, jax.Array]]


def next_token(
    model: Any, tokens: jax.Array, key: jax.Array | None, training: bool
) -> LossAndMetrics:
    """Compute the loss in nats per token, of integers `[B, T + 1]`.

    The first tokens of documents may be marked, see `unpacked`. In training, the load-balancing
    loss of experts and the z-loss are added.
    """
    config, more = model.config, {}
    if training:
        more = {"balance": getattr(config, "balance_loss", 0.0), "z": config.z_loss}
    tokens, packed = unpacked(tokens)
    return model.loss(tokens, key=key, **more, **packed), {}


def right_class(model: Any, batch: Any, key: jax.Array | None, training: bool) -> LossAndMetrics:
    """Compute the cross-entropy in nats, and the accuracy, of the classes of pictures or pixels.

    The batch has "image", uint8 `[B, height, width, channels]`, which is scaled to [-1, 1] for the
    model, and "label", int32 `[B]` or `[B, height, width]`, below the number of classes.
    """
    logits = model(scaled(batch["image"]), **({} if key is None else {"key": key}))
    labels = batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    is_right = jnp.argmax(logits, axis=-1) == labels
    return jnp.mean(losses), {"accuracy": jnp.mean(is_right.astype(jnp.float32))}


def scaled(image: jax.Array) -> jax.Array:
    """Convert uint8 pictures to float32 in [-1, 1]."""
    return image.astype(jnp.float32) / 127.5 - 1


def next_moment(
    model: Any, series: jax.Array, key: jax.Array | None, training: bool
) -> LossAndMetrics:
    """Compute the mean squared error of predictions, for series float32 `[B, T + 1, F]`.

    The model predicts each moment (time step) from the moments before it.
    """
    return jnp.mean((next_moments(model, series[:, :-1]) - series[:, 1:]) ** 2), {}


def next_moments(model: Any, series: jax.Array) -> jax.Array:
    """Predict the moment after each moment of series `[B, T, F]`, in float32."""
    return model(series.astype(model.config.dtype)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Objective:
    """The training objective of a kind of model.

    Attributes:
      loss: `loss(model, batch, key, training)` returns the loss and a dictionary of metrics. `key`
        is the random key of dropout, or None.
      output: `output(model, examples)` returns the model's output for examples `[B, ...]` without
        targets.
    """

    loss: Callable[[Any, Any, jax.Array | None, bool], LossAndMetrics]
    output: Callable[[Any, jax.Array], jax.Array]


_TEXT = Objective(next_token, lambda model, tokens: model(tokens))
_PICTURES = Objective(right_class, lambda model, image: model(scaled(image)))
_SERIES = Objective(next_moment, next_moments)

OBJECTIVES: dict[type[Any], Objective] = {
    GPT2Config: _TEXT,
    LlamaConfig: _TEXT,
    ResNetConfig: _PICTURES,
    ViTConfig: _PICTURES,
    UNetConfig: _PICTURES,
    RecurrentConfig: _SERIES,
    ODEConfig: _SERIES,
}
