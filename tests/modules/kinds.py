"""Losses of every kind of module, for the functions of the core that take a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import xform

WIDTH, LAYERS = 8, 3
X = jnp.sin(jnp.arange(16.0 * WIDTH).reshape(16, WIDTH))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A loss `loss(module, x)`, and what its library offers.

    Attributes:
      build: returns the module, or its parameters.
      loss: the loss.
      gradient: xform's `grad` for the library.
      jit: the `jit` of the library.
    """

    build: Callable[[], Any]
    loss: Callable[..., Any]
    gradient: Callable[..., Any] = xform.grad
    jit: Callable[..., Any] = jax.jit


class Net(nnx.Module):
    """Dropout and running statistics, which each call changes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.enter = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.leave = nnx.Linear(2 * WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.leave(self.dropout(jnp.tanh(self.norm(self.enter(x)))))


class Layer(nnx.Module):
    """A residual layer with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jnp.tanh(self.linear(x)))


@nnx.split_rngs(splits=LAYERS)
@nnx.vmap
def stacked(rngs: nnx.Rngs) -> Layer:
    """Return layers whose parameters are stacked along the first axis."""
    return Layer(rngs)


class Scanned(nnx.Module):
    """Layers in an `nnx.scan`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = stacked(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )


class Mapped(nnx.Module):
    """Layers in an `nnx.vmap`, all of the same input."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = stacked(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x).sum(0)


class Rematted(nnx.Module):
    """Layers in `nnx.remat`, one of them twice."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = Layer(rngs), Layer(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.remat(Layer.__call__)
        return run(self.first, run(self.second, run(self.first, x)))


class Dense(nn.Module):
    """A residual layer of Linen with dropout, which can be scanned."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dropout(0.1, deterministic=False)(jnp.tanh(nn.Dense(WIDTH)(x)))


class _Carried(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return Dense()(x), None


class LinenScanned(nn.Module):
    """Layers in Linen's `scan`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            _Carried,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
        )
        return layers()(x, None)[0]


class LinenRematScanned(nn.Module):
    """Layers in Linen's `remat_scan`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.remat_scan(Dense, lengths=(2, 2))()(x)


class LinenMapped(nn.Module):
    """Layers in Linen's `vmap`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.vmap(
            Dense,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=None,
            axis_size=LAYERS,
        )
        return layers()(x).sum(0)


class EquinoxNet(eqx.Module):
    """Functions, texts and Python numbers among the leaves, and a random key."""

    enter: eqx.nn.Linear
    leave: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    activation: Callable[..., Any]
    key: jax.Array
    name: str = eqx.field(static=True)

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.enter = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=first)
        self.leave = eqx.nn.Linear(2 * WIDTH, 1, key=second)
        self.dropout, self.activation = eqx.nn.Dropout(0.1), jnp.tanh
        self.key, self.name = key, "net"

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.leave(self.dropout(self.activation(self.enter(x)), key=self.key))


def loss(model: Callable[..., Any], x: jax.Array) -> jax.Array:
    """Return the mean square of what a module returns."""
    return jnp.mean((model(x) - 1) ** 2)


def batched_loss(model: Callable[..., Any], x: jax.Array) -> jax.Array:
    """Return the loss of an Equinox module, which takes one example."""
    return loss(jax.vmap(model), x)


def _nnx(kind: Callable[..., Any]) -> Kind:
    return Kind(lambda: kind(nnx.Rngs(0)), loss, xform.flax.grad, nnx.jit)


def _linen(kind: Callable[[], Any]) -> Kind:
    key = jax.random.key(0)
    model = kind()
    build = lambda: model.init({"params": key, "dropout": key}, X)

    def linen_loss(variables: Any, x: jax.Array) -> jax.Array:
        return loss(lambda x: model.apply(variables, x, rngs={"dropout": key}), x)

    return Kind(build, linen_loss)


KINDS = {
    "nnx": _nnx(Net),
    "nnx.scan": _nnx(Scanned),
    "nnx.vmap": _nnx(Mapped),
    "nnx.remat": _nnx(Rematted),
    "nn.scan": _linen(LinenScanned),
    "nn.remat_scan": _linen(LinenRematScanned),
    "nn.vmap": _linen(LinenMapped),
    "equinox": Kind(
        lambda: EquinoxNet(jax.random.key(0)),
        batched_loss,
        xform.equinox.filter_grad,
        eqx.filter_jit,
    ),
}
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
