"""The symplectic adjoint: the gradient of the steps, in the memory of one field evaluation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from models.nets.ode import flow
from models.nets.symplectic import symplectic_flow
from tests.reference import close


def field(params: Any, t: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["in"] + t) @ params["out"] - 0.5 * x


def inputs(width: int = 4, hidden: int = 16, rows: int = 3) -> tuple[Any, jax.Array]:
    a, b, x = (jax.random.normal(jax.random.key(i), shape) for i, shape in
               enumerate(((width, hidden), (hidden, width), (rows, width))))  # fmt: skip
    return {"in": a, "out": b / 4}, x


def losses(steps: int, time: float = 1.5) -> tuple[Any, Any]:
    ours = lambda p, x: jnp.sum(jnp.sin(symplectic_flow(field, p, x, time, steps)))
    theirs = lambda p, x: jnp.sum(jnp.sin(flow(lambda t, x: field(p, t, x), x, time, steps)))
    return ours, theirs


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("gradient", [jax.grad, xform.grad], ids=["jax", "xform"])
def test_the_gradient_is_that_of_the_steps(steps: int, gradient: Any) -> None:
    with jax.enable_x64():
        params, x = jax.tree.map(lambda a: a.astype(jnp.float64), inputs())
        ours, theirs = losses(steps)
        np.testing.assert_allclose(ours(params, x), theirs(params, x), rtol=1e-13)
        got = jax.jit(gradient(ours, argnums=(0, 1)))(params, x)
        close(jax.tree.leaves(got), jax.tree.leaves(jax.grad(theirs, (0, 1))(params, x)), 1e-12)


def test_states_are_pytrees_and_lanes_are_mapped() -> None:
    pair = lambda p, t, x: {"q": x["p"], "p": -p * jnp.sin(x["q"])}
    last = lambda p, x: jnp.sum(symplectic_flow(pair, p, x, 1.0, 5)["q"])
    same = lambda p, x: jnp.sum(flow(lambda t, x: pair(p, t, x), x, 1.0, 5)["q"])
    x = {"q": jnp.linspace(0.0, 1.0, 4), "p": jnp.ones(4)}
    ours = jax.vmap(xform.grad(last), (None, 0))(2.0, x)
    close([ours], [jax.vmap(jax.grad(same), (None, 0))(2.0, x)], 1e-5)


def test_symplectic_adjoint_memory_grows_by_one_state_per_step() -> None:
    """The residuals of four field evaluations, which the direct gradient saves, are not stacked."""
    types = jax.eval_shape(lambda: inputs(width=16, hidden=256, rows=64))

    def temp(loss: Any) -> int:
        policy = xform.policies.save_everything
        run = jax.jit(xform.grad(loss, policy=policy)).lower(*types).compile()
        memory: Any = run.memory_analysis()
        return memory.temp_size_in_bytes

    few, many = (tuple(map(temp, losses(n))) for n in (10, 110))
    state = 64 * 16 * 4
    assert many[0] - few[0] <= 1.1 * 100 * state
    assert many[1] - few[1] >= 10 * 100 * state
