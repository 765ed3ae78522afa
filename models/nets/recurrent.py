"""LSTM and GRU, with the same gates as in cuDNN and PyTorch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nets.axes import by_example
from models.nets.dense import dense
from models.nets.sizes import SIZE, dtype_setting
from models.settings import setting

State = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """Settings of a stack of recurrent layers."""

    cell: str = setting(
        "lstm", "Kind of the recurrent layers.", choices=("lstm", "gru"), change="never"
    )
    features: int = setting(
        64, "Number of features of the series; by default that of the data.", **SIZE
    )
    width: int = setting(128, "Width of the recurrent state.", **SIZE)
    depth: int = setting(1, "Number of layers.", **SIZE)
    dtype: str = dtype_setting()
    output_layer: bool = setting(
        False,
        "Add a linear layer that maps each state to the features; training needs it.",
        change="never",
    )


class LSTM(nnx.Module):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997, with the forget gate of 2000)."""

    def __init__(self, inputs: int, width: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        gates = {"gates": 4, "mlp": width}
        self.input = dense({"embed": inputs}, gates, bias=True, dtype=dtype, rngs=rngs)
        self.recur = dense({"embed": width}, gates, bias=True, dtype=dtype, rngs=rngs)

    def start(self, shape: tuple[int, ...], dtype: Any) -> State:
        """Return the initial state, zeros of a shape."""
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def step(self, state: State, from_input: jax.Array) -> State:
        """Return the next state. `from_input` is the input's part of the gates, `[B, 4, H]`."""
        h, c = state
        i, f, g, o = jnp.moveaxis(from_input + self.recur(h), -2, 0)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c), c


class GRU(nnx.Module):
    """A gated recurrent unit (arXiv:1406.1078), with the reset gate after the matrix product."""

    def __init__(self, inputs: int, width: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        gates = {"gates": 3, "mlp": width}
        self.input = dense({"embed": inputs}, gates, bias=True, dtype=dtype, rngs=rngs)
        self.recur = dense({"embed": width}, gates, bias=True, dtype=dtype, rngs=rngs)

    def start(self, shape: tuple[int, ...], dtype: Any) -> State:
        """Return the initial state, zeros of a shape."""
        return (jnp.zeros(shape, dtype),)

    def step(self, state: State, from_input: jax.Array) -> State:
        """Return the next state. `from_input` is the input's part of the gates, `[B, 3, H]`."""
        (h,) = state
        r, z, n = jnp.moveaxis(from_input, -2, 0)
        from_r, from_z, from_n = jnp.moveaxis(self.recur(h), -2, 0)
        r, z = jax.nn.sigmoid(r + from_r), jax.nn.sigmoid(z + from_z)
        return ((1 - z) * jnp.tanh(n + r * from_n) + z * h,)


CELLS = {"lstm": LSTM, "gru": GRU}


class Recurrent(nnx.Module):
    """A stack of recurrent layers. Each reads the states of the one before it at all time steps."""

    def __init__(self, config: RecurrentConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        widths = [c.features, *[c.width] * (c.depth - 1)]
        kind = CELLS[c.cell]
        self.layers = nnx.List([kind(n, c.width, dtype=c.dtype, rngs=rngs) for n in widths])
        sides = {"embed": c.width}, {"classes": c.features}
        self.head = dense(*sides, bias=True, dtype=c.dtype, rngs=rngs) if c.output_layer else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map series `[B, T, features]` to the last layer's states `[B, T, width]`.

        With an output layer, map them to `[B, T, features]`, a linear function of the states.
        """
        for layer in self.layers:
            graphdef, params = nnx.split(layer)

            def step(state: State, from_input: jax.Array, graphdef=graphdef, params=params) -> Any:
                state = tuple(map(by_example, state))
                state = nnx.merge(graphdef, params).step(state, from_input)
                return state, state[0]

            from_inputs = jnp.moveaxis(layer.input(by_example(x)), 1, 0)  # one matrix product
            start = layer.start((x.shape[0], self.config.width), from_inputs.dtype)
            x = jnp.moveaxis(jax.lax.scan(step, start, from_inputs)[1], 0, 1)
        return x if self.head is None else self.head(by_example(x))
