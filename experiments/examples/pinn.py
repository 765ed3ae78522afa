"""A physics-informed network: derivatives of a network by its input, inside a loss.

The heat equation is `u_t = u_xx` on [0, 1], with 0 at both ends and `sin(pi x)` at the start. Its
solution is `exp(-pi² t) sin(pi x)`. The network's second derivative is forward mode over forward
mode. The gradient of the loss by the weights is reverse mode.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import xform

WIDTH, STEPS = 32, 2000


def init(key: jax.Array) -> Any:
    """Return the weights of a network with two hidden layers."""
    sizes = [(2, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)]
    keys = jax.random.split(key, len(sizes))
    return [(jax.random.normal(k, s) / s[0] ** 0.5, jnp.zeros(s[1]))
            for k, s in zip(keys, sizes, strict=True)]  # fmt: skip


def u(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
    """Compute the temperature. Boundary and initial values hold by construction."""
    h = jnp.stack([t, x])
    for w, b in params[:-1]:
        h = jnp.tanh(h @ w + b)
    (w, b) = params[-1]
    return jnp.sin(jnp.pi * x) * (1 + t * (h @ w + b)[0])


def residual(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
    """Compute how far the network is from the equation at a point."""
    u_x = lambda x: xform.jvp(lambda x: u(params, t, x), (x,), (1.0,))[1]
    u_xx = xform.jvp(u_x, (x,), (1.0,))[1]
    u_t = xform.jvp(lambda t: u(params, t, x), (t,), (1.0,))[1]
    return u_t - u_xx


def loss(params: Any, points: jax.Array) -> jax.Array:
    """Compute the mean square of the residual."""
    return jnp.mean(jax.vmap(residual, (None, 0, 0))(params, points[:, 0], points[:, 1]) ** 2)


def main() -> float:
    """Return the largest error against the solution."""
    key, start = jax.random.split(jax.random.key(0))
    params = init(start)
    adam = optax.adam(optax.cosine_decay_schedule(5e-3, STEPS))

    @jax.jit
    def step(state: Any, key: jax.Array) -> Any:
        params, opt = state
        points = jax.random.uniform(key, (256, 2)) * jnp.array([0.3, 1.0])
        updates, opt = adam.update(xform.grad(loss)(params, points), opt)
        return (optax.apply_updates(params, updates), opt), None

    (params, _), _ = jax.lax.scan(step, (params, adam.init(params)), jax.random.split(key, STEPS))
    t, x = jnp.meshgrid(jnp.linspace(0, 0.3, 20), jnp.linspace(0, 1, 20))
    found = jax.vmap(u, (None, 0, 0))(params, t.ravel(), x.ravel())
    error = float(jnp.abs(found - (jnp.exp(-(jnp.pi**2) * t) * jnp.sin(jnp.pi * x)).ravel()).max())
    print(f"the temperature is off by {error:.4f} at most")
    return error


if __name__ == "__main__":
    main()
