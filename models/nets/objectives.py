"""What a model is trained for: its loss on a batch, and what else judges it there.

A loss is a mean over the batch, in float32; beside it are measures, numbers by name that are only
read. Without `training` there is neither dropout nor a term that only steers the training; norms
then use the statistics that they keep, since the model is in its mode of evaluation.
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

Judged = tuple[jax.Array, dict[str, jax.Array]]


def next_token(model: Any, tokens: jax.Array, key: jax.Array | None, training: bool) -> Judged:
    """Nats per token, of integers `[B, T + 1]` in which documents may be marked: see `unpacked`.

    In training the imbalance of experts and the size of logits count too.
    """
    config, more = model.config, {}
    if training:
        more = {"balance": getattr(config, "balance", 0.0), "z": config.z_loss}
    tokens, packed = unpacked(tokens)
    return model.loss(tokens, key=key, **more, **packed), {}


def right_class(model: Any, batch: Any, key: jax.Array | None, training: bool) -> Judged:
    """Nats of the class of each picture, or of each pixel, and the share of classes that are right.

    The batch has "image", uint8 `[B, height, width, channels]`, which the model reads as numbers
    from -1 to 1; and "label", int32 `[B]` or `[B, height, width]`, below the number of classes.
    """
    logits = model(scaled(batch["image"]), **({} if key is None else {"key": key}))
    labels = batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = jnp.argmax(logits, axis=-1) == labels
    return jnp.mean(losses), {"accuracy": jnp.mean(right.astype(jnp.float32))}


def scaled(image: jax.Array) -> jax.Array:
    """Bytes of pictures as float32 from -1 to 1."""
    return image.astype(jnp.float32) / 127.5 - 1


def next_moment(model: Any, series: jax.Array, key: jax.Array | None, training: bool) -> Judged:
    """The mean square of what is wrong in the next moment, of series float32 `[B, T + 1, F]`."""
    return jnp.mean((next_moments(model, series[:, :-1]) - series[:, 1:]) ** 2), {}


def next_moments(model: Any, series: jax.Array) -> jax.Array:
    """What follows on each moment of series `[B, T, F]`, in float32."""
    return model(series.astype(model.config.dtype)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a model is trained for.

    Attributes:
      loss: of a model, a batch, a key of dropout (or None), and whether it is for training.
      answer: what the model says of examples, `[B, ...]`, without what is to be predicted.
    """

    loss: Callable[[Any, Any, jax.Array | None, bool], Judged]
    answer: Callable[[Any, jax.Array], jax.Array]


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
