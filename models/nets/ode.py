"""A neural ordinary differential equation: the flow of a state along a learned vector field.

Source: Chen et al., "Neural Ordinary Differential Equations", arXiv:1806.07366. The gradient is the
exact gradient of the discrete steps. With a memory budget, the steps are recomputed in the backward
pass from a few stored states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.nets.axes import by_example
from models.nets.dense import dense
from models.nets.sizes import SIZE, dtype_setting
from models.settings import setting


@dataclasses.dataclass(frozen=True)
class ODEConfig:
    """Settings of the field and its integration."""

    width: int = setting(
        64, "Width of the state; by default the number of features in the data.", **SIZE
    )
    mlp_width: int = setting(256, "Width of the hidden layer of each MLP.", **SIZE)
    integration_steps: int = setting(
        200, "Number of integration steps (RK4) of a neural ODE.", **SIZE
    )
    integration_time: float = setting(
        1.0, "Integration time of a neural ODE.", above=0, change="never"
    )
    dtype: str = dtype_setting()


def flow(field: Callable[[Any, Any], Any], x: Any, time: float, steps: int) -> Any:
    """Integrate `dx/dt = field(t, x)` from 0 to `time`, with equal RK4 (Runge-Kutta) steps."""
    h = time / steps
    # The state after the fraction `part` of a step with the slope `k`.
    ahead = lambda x, part, k: jax.tree.map(lambda x, k: x + part * h * k, x, k)

    def step(x: Any, i: jax.Array) -> Any:
        t = i * h
        a = field(t, x)
        b = field(t + h / 2, ahead(x, 1 / 2, a))
        c = field(t + h / 2, ahead(x, 1 / 2, b))
        d = field(t + h, ahead(x, 1, c))
        mean = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, a, b, c, d)
        return ahead(x, 1, mean), None

    return jax.lax.scan(step, x, jnp.arange(steps))[0]


class NeuralODE(nnx.Module):
    """The flow of the field `out(tanh(enter(x, t)))`."""

    def __init__(self, config: ODEConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        sides = {"embed": c.width + 1}, {"mlp": c.mlp_width}
        self.enter = dense(*sides, bias=True, dtype=c.dtype, rngs=rngs)
        self.out = dense(
            {"mlp": c.mlp_width}, {"embed": c.width}, bias=True, dtype=c.dtype, rngs=rngs
        )

    def field(self, t: Any, x: jax.Array) -> jax.Array:
        """Return the time derivative of states `[..., D]` at time `t`."""
        times = jnp.broadcast_to(jnp.asarray(t, x.dtype), (*x.shape[:-1], 1))
        read = by_example(jnp.concatenate([x, times], axis=-1))
        return self.out(by_example(jnp.tanh(self.enter(read))))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map states `[..., D]` at time 0 to the states at `config.integration_time`."""
        graphdef, params = nnx.split(self)
        field = lambda t, x: nnx.merge(graphdef, params).field(t, x)
        return flow(field, x, self.config.integration_time, self.config.integration_steps)
