"""Fit a neural ODE to data: the gradient of many small steps, with few stored states.

The model follows a spiral for 200 fourth-order Runge-Kutta steps; the field is a network. Under the
budget the backward pass stores only a few states, and recomputes steps from these.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import xform
from models.nets.ode import flow

STEPS, TIME, UPDATES = 200, 6.0, 400


def spiral(t: jax.Array) -> jax.Array:
    """Return the data at time `t`."""
    return jnp.exp(-0.2 * t) * jnp.stack([jnp.cos(t), jnp.sin(t)])


def field(params: Any, t: Any, x: jax.Array) -> jax.Array:
    """A network with one hidden layer."""
    w, b, v = params
    return jnp.tanh(x @ w + b) @ v


def loss(params: Any, times: jax.Array) -> jax.Array:
    """Compute the mean square distance at times, which divide the interval into equal parts."""
    part = TIME / len(times)
    x, total = spiral(jnp.asarray(0.0)), 0.0
    for t in times:
        x = flow(lambda t, x: field(params, t, x), x, part, STEPS // len(times))
        total += jnp.sum((x - spiral(t)) ** 2)
    return total / len(times)


def main() -> tuple[float, float]:
    """Return the loss before and after."""
    keys = jax.random.split(jax.random.key(0), 2)
    w, v = (jax.random.normal(k, s) / s[0] ** 0.5
            for k, s in zip(keys, ((2, 32), (32, 2)), strict=True))  # fmt: skip
    params, times = (w, jnp.zeros(32), v), jnp.linspace(TIME / 8, TIME, 8)
    adam = optax.adam(1e-2)
    state = adam.init(params)
    gradient = xform.value_and_grad(loss, policy=xform.policies.budget("64 kB"))

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, grads = gradient(params, times)
        updates, state = adam.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    losses: list[float] = []
    for _ in range(UPDATES):
        params, state, value = step(params, state)
        losses.append(float(value))
    print(f"mean square distance {losses[0]:.3f} -> {losses[-1]:.5f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
