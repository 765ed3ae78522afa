"""Twenty models that train: different libraries, depths, widths, initializations, activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from experiments.health.networks import NETWORKS, entropy, normal
from models.nets.gpt2 import GPT2Config
from models.nets.llama import LlamaConfig
from models.nets.mlp import MLPConfig
from models.nets.presets import build
from models.nets.recurrent import RecurrentConfig
from models.nets.resnet import ResNetConfig
from models.nets.vit import ViTConfig

CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model that trains: parameters and batch from a key, their loss, and Adam's rate."""

    init: Callable[[Any], Any]
    batch: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]
    rate: float = 1e-3


def vectors(width: int, examples: int = 64) -> Callable[[Any], Any]:
    """Return points around ten centers, with their labels."""

    def batch(key: Any) -> Any:
        a, b = jax.random.split(key)
        labels = jax.random.randint(a, (examples,), 0, CLASSES)
        centers = jax.random.normal(jax.random.key(7), (CLASSES, width))
        return centers[labels] + 0.5 * jax.random.normal(b, (examples, width)), labels

    return batch


def images(size: int, channels: int = 3, examples: int = 16) -> Callable[[Any], Any]:
    """Return images around ten centers, with their labels."""

    def batch(key: Any) -> Any:
        x, labels = vectors(size * size * channels, examples)(key)
        return x.reshape(examples, size, size, channels), labels

    return batch


def words(vocab: int, length: int, examples: int = 16) -> Callable[[Any], Any]:
    """Return sequences that count upward by a random step."""

    def batch(key: Any) -> Any:
        a, b = jax.random.split(key)
        start = jax.random.randint(a, (examples, 1), 0, vocab)
        step = jax.random.randint(b, (examples, 1), 1, 5)
        return (start + step * jnp.arange(length)) % vocab

    return batch


def waves(length: int, channels: int, examples: int = 16) -> Callable[[Any], Any]:
    """Return series, and their running means."""

    def batch(key: Any) -> Any:
        x = jax.random.normal(key, (examples, length, channels))
        return x, jnp.cumsum(x, 1) / jnp.arange(1, length + 1)[:, None]

    return batch


def perceptron(width: int, depth: int, activation: Any, gain: float, *, bias: bool = True,
               draw: Any = normal, rate: float = 1e-3) -> Preset:  # fmt: skip
    """Return a plain perceptron, without any scopes."""

    def init(key: Any) -> Any:
        keys = jax.random.split(key, depth + 1)
        layers = [(draw(k, (width, width), gain), jnp.zeros(width)) for k in keys[:-1]]
        return layers, normal(keys[-1], (width, CLASSES))

    def loss(params: Any, batch: Any) -> Any:
        layers, head = params
        h, labels = batch
        for w, b in layers:
            h = activation(h @ w + b if bias else h @ w)
        return entropy(h @ head, labels)

    return Preset(init, vectors(width), loss, rate)


def orthogonal(key: Any, shape: tuple[int, ...], gain: float) -> Any:
    """Return weights with orthonormal rows, times the gain."""
    return jax.nn.initializers.orthogonal(gain)(key, shape)


def network(name: str, rate: float) -> Preset:
    """Return one of the networks for planted faults, without a fault."""
    of = NETWORKS[name]
    return Preset(of.init, of.batch, lambda p, b: of.loss(p, b, -1), rate)


def flax(config: Any, batch: Any, loss: Any, rate: float = 1e-3) -> Preset:
    """Return a model of `models/` as a function of its parameters; `loss(model, batch)`."""
    graph, _, rest = nnx.split(build(config), nnx.Param, ...)

    def init(key: Any) -> Any:
        return nnx.state(build(config, int(jax.random.randint(key, (), 0, 2**31 - 1))), nnx.Param)

    return Preset(init, batch, lambda p, b: loss(nnx.merge(graph, p, rest, copy=True), b), rate)


def classified(model: Any, batch: Any) -> Any:
    """Compute the cross-entropy of a model's scores."""
    return entropy(model(batch[0]), batch[1])


def predicted(model: Any, tokens: Any) -> Any:
    """Compute the loss of a language model."""
    return model.loss(tokens)


def followed(model: Any, batch: Any) -> Any:
    """Compute the squared distance of a recurrent network's first states from the target."""
    return jnp.mean((model(batch[0])[..., : batch[1].shape[-1]] - batch[1]) ** 2)


def linen(module: Any, batch: Any, rate: float = 1e-3) -> Preset:
    """Return a Linen module that classifies."""
    x = jax.eval_shape(batch, jax.random.key(0))[0]
    init = lambda key: module.init(key, jnp.zeros(x.shape, x.dtype))
    return Preset(init, batch, lambda p, b: entropy(module.apply(p, b[0]), b[1]), rate)


class Convolutions(nn.Module):
    """Two convolutions with pooling, then two dense layers."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for width in (16, 32):
            x = nn.max_pool(nn.relu(nn.Conv(width, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1))))


class Gated(nn.Module):
    """Six residual blocks with a norm and a gate, without dropout."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(6):
            y = nn.LayerNorm()(x)
            x = x + nn.Dense(x.shape[-1])(nn.silu(nn.Dense(128)(y)) * nn.Dense(128)(y))
        return nn.Dense(CLASSES)(nn.RMSNorm()(x))


def equinox(rate: float = 1e-3) -> Preset:
    """Return Equinox's own perceptron, mapped over examples."""
    make = lambda key: eqx.nn.MLP(32, CLASSES, 64, 4, jax.nn.gelu, key=key)
    _, static = eqx.partition(make(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params: Any, batch: Any) -> Any:
        return entropy(jax.vmap(eqx.combine(params, static))(batch[0]), batch[1])

    return Preset(lambda key: eqx.filter(make(key), eqx.is_inexact_array), vectors(32), loss, rate)


def leaky(x: Any) -> Any:
    """Compute a leaky ReLU, written by hand."""
    return jnp.where(x > 0, x, 0.2 * x)


_GPT2 = GPT2Config(vocab=64, context=32, width=64, depth=4, heads=4, dropout=0.0)
_LLAMA = LlamaConfig(
    vocab=64, context=32, width=64, depth=3, heads=4, mlp_width=128, tie_embeddings=True
)
_MLP = MLPConfig(inputs=32, width=64, hidden=128, outputs=CLASSES, depth=12)
_RESNET = ResNetConfig(8, (8, 16), (2, 2), CLASSES, bottleneck=False, small_pictures=True)
_VIT = ViTConfig(16, 4, 64, 3, 4, 128, CLASSES, norm_epsilon=1e-6)

PRESETS: dict[str, Callable[[], Preset]] = {
    "perceptron, 3 x 256, ReLU, He": lambda: perceptron(256, 3, jax.nn.relu, 2**0.5),
    "perceptron, 12 x 64, ReLU, He": lambda: perceptron(64, 12, jax.nn.relu, 2**0.5),
    "perceptron, 8 x 128, tanh, Glorot": lambda: perceptron(128, 8, jnp.tanh, 1.0),
    "perceptron, 30 x 64, tanh, orthogonal": lambda: perceptron(
        64, 30, jnp.tanh, 1.05, draw=orthogonal
    ),
    "perceptron, 6 x 128, GELU, no bias": lambda: perceptron(128, 6, jax.nn.gelu, 1.5, bias=False),
    "perceptron, 10 x 96, SELU, LeCun": lambda: perceptron(96, 10, jax.nn.selu, 1.0),
    "perceptron, 2 x 128, sigmoid": lambda: perceptron(128, 2, jax.nn.sigmoid, 2.0, rate=3e-3),
    "perceptron, 16 x 64, leaky ReLU": lambda: perceptron(64, 16, leaky, 1.39),
    "MLP-50, orthogonal": lambda: network("MLP-50", 3e-4),
    "MLP-50, residual": lambda: network("MLP-50, residual", 3e-4),
    "RNN-200": lambda: network("RNN-200", 3e-3),
    "transformer, plain JAX": lambda: network("transformer", 1e-3),
    "GPT-2, scanned, Flax NNX": lambda: flax(_GPT2, words(64, 33), predicted, 3e-3),
    "GPT-2, unrolled, remat": lambda: flax(
        dataclasses.replace(_GPT2, scan_layers=False, remat="save_nothing"),
        words(64, 33),
        predicted,
        3e-3,
    ),
    "Llama, SwiGLU, tied": lambda: flax(_LLAMA, words(64, 33), predicted, 3e-3),
    "residual MLP, 12 blocks, scanned": lambda: flax(_MLP, vectors(32), classified),
    "ResNet, batch norm, Flax NNX": lambda: flax(_RESNET, images(16), classified, 3e-3),
    "LSTM, 60 steps": lambda: flax(RecurrentConfig("lstm", 4, 32), waves(60, 4), followed, 1e-2),
    "convolutions, Flax Linen": lambda: linen(Convolutions(), images(16)),
    "perceptron, 4 x 64, Equinox": lambda: equinox(),
}
