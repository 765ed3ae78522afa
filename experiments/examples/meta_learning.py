"""Meta-learning through 1,000 inner steps, in a byte budget.

A learner takes 1,000 steps of gradient descent on a small network. The gradient by its *initial*
weights goes back through all of them. `jax.grad` takes 40 times the budget for it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import xform

INNER, RATE, OUTER, META_RATE = 1000, 0.05, 20, 0.03
BUDGET = "400 kB"


def net(params: Any, x: jax.Array) -> jax.Array:
    """A network from numbers `[N, 1]` to numbers `[N, 1]`."""
    w, b, v = params
    return jnp.tanh(x @ w + b) @ v


def fit(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute the mean square error."""
    return jnp.mean((net(params, x) - y) ** 2)


def after(params: Any, task: jax.Array) -> jax.Array:
    """Compute the error on other points of a task, after learning it from a few."""
    few, many = jnp.linspace(-2, 2, 8)[:, None], jnp.linspace(-2, 2, 32)[:, None]

    def step(params: Any, _: Any) -> tuple[Any, None]:
        grads = xform.grad(fit)(params, few, jnp.sin(few + task))
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), None

    params, _ = jax.lax.scan(step, params, None, length=INNER)
    return fit(params, many, jnp.sin(many + task))


def main() -> tuple[float, float, float]:
    """Return the mean error over tasks before and after, and the bytes relative to `jax.grad`'s."""
    keys = jax.random.split(jax.random.key(1), 2)
    params = (jax.random.normal(keys[0], (1, 16)), jnp.zeros(16),
              jax.random.normal(keys[1], (16, 1)) / 4)  # fmt: skip
    tasks = jnp.linspace(0.0, 3.0, 4)
    loss = lambda params: jnp.mean(jax.lax.map(lambda t: after(params, t), tasks))
    plan = xform.plan(loss, params, policy=xform.policies.budget(BUDGET))
    usual = xform.memory_analysis(jax.value_and_grad(loss), params).total_bytes or 0
    step = jax.jit(xform.value_and_grad(loss, policy=plan))
    errors: list[float] = []
    adam = optax.adam(META_RATE)
    state = adam.init(params)
    for _ in range(OUTER):
        error, grads = step(params)
        updates, state = adam.update(grads, state)
        params = optax.apply_updates(params, updates)
        errors.append(float(error))
    share = (plan.compiled_bytes or 0) / usual
    print(f"error {errors[0]:.5f} -> {errors[-1]:.5f} in {share:.3f} of {usual:,} bytes")
    return errors[0], errors[-1], share


if __name__ == "__main__":
    main()
