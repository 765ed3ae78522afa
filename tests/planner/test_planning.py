"""The cost of planning: the time without compilations, and the compilations apart."""

import time

import jax
import jax.numpy as jnp

import xform
from xform.planner import measure
from xform.planner.planning import PlanningCost, measure_planning


def loss(ws, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(jnp.sin(h @ w)), None), x, ws)[0].sum()


def test_compilations_are_not_part_of_the_time_of_planning() -> None:
    ws, x = jnp.ones((8, 32, 32)), jnp.ones((64, 32))
    gradient = jax.jit(xform.grad(loss, policy=xform.policies.budget("300KiB")))
    measure._known.clear()
    with measure_planning() as cost:
        start = time.perf_counter()
        gradient.trace(ws, x)
        spent = time.perf_counter() - start
    assert cost.compiles > 0
    assert cost.compile_seconds > 0
    assert cost.seconds + cost.compile_seconds <= spent
    assert f"{cost.compiles} program" in str(cost)


def test_the_text() -> None:
    assert str(PlanningCost(1, 23.0, 0, 4, 155.0)) == (
        "0 FLOP of unfused operations recomputed, planned in 23.0 s, 4 programs compiled in 155.0 s"
    )
    assert (
        str(PlanningCost(1, 0.5, 0))
        == "0 FLOP of unfused operations recomputed, planned in 500.0 ms"
    )
