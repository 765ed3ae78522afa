"""Loops that contain loops save only their states; the other loops save what was requested."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.emitted import emitted
from tests.reference import close
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import analyze
from xform.interpret.node import gather
from xform.planner.candidates.large_loops import planned_loops
from xform.planner.candidates.states import all_states, outer_states
from xform.planner.costs.outcome import saved_bytes
from xform.planner.decide import schedule
from xform.planner.plan.decision import edit_decision
from xform.policies import MinCut
from xform.program.ir import evaluate, trace

W = np.cos(np.arange(48.0)).reshape(3, 4, 4) / 2
X = np.sin(np.arange(32.0)).reshape(8, 4)
OUTER, INNER = 6, 3
MASKS = (True, True), (True,)


def layer(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) @ w.T)


def inside(x, w):
    return lax.scan(lambda x, w: (layer(x, w), None), jnp.sin(x), w)[0]


def loss(w, x):
    return jnp.sum(lax.scan(lambda x, _: (inside(x, w), None), x, None, length=OUTER)[0] ** 2)


@pytest.fixture
def base(x64):
    """Return the plan of a minimum cut, with its program."""
    prog = trace(lambda *xs: [loss(*xs)], W, X)
    return prog, schedule(analyze(prog, *MASKS), MinCut(), backend="cpu")


def changed(base, change):
    return schedule(base[1].joint, edit_decision(base[1], change), "cpu")


def by_trips(base, made):
    return {loop.node.iterations: loop for loop in planned_loops(made, base[0]).values()}


@pytest.mark.parametrize("change", [outer_states, all_states(MinCut(), {})])
def test_the_outer_loop_keeps_one_state_a_trip_and_nothing_else(base, change) -> None:
    made = changed(base, change)
    outer = by_trips(base, made)[OUTER]
    (inner,) = outer.schedules
    assert inner.saved == ()
    assert any(outer.node.stacked_inputs(outer.schedules))
    # And the last state, which the square outside reads.
    least = (OUTER + 1) * X.nbytes
    assert saved_bytes(made) == least < saved_bytes(base[1])


def test_inner_loop_residuals_follow_the_prices_of_the_cut(base) -> None:
    kept = {
        price: by_trips(base, changed(base, all_states(MinCut(price, price), {})))[INNER]
        .schedules[0]
        .saved
        for price in (0.0, 1e9)
    }
    size = lambda values: sum(aval_bytes(v.aval) for v in values)
    assert size(kept[0.0]) < size(kept[1e9])


def test_some_loops_store_so_many_states(base) -> None:
    outer, inner = (by_trips(base, base[1])[n].node for n in (OUTER, INNER))
    made = changed(base, all_states(MinCut(), {inner: 1}))
    (within,) = by_trips(base, made)[INNER].schedules
    assert (within.snapshots, by_trips(base, made)[OUTER].schedules[0].snapshots) == (1, None)
    assert gather(inner.stored_states([within]), inner.stacked_inputs([within])) == [2]
    made = changed(base, all_states(MinCut(), {outer: 2}))
    assert by_trips(base, made)[OUTER].schedules[0].snapshots == 2
    assert saved_bytes(made) < OUTER * X.nbytes


@pytest.mark.parametrize("slots", [None, "inner", "outer"])
def test_the_gradient_is_the_same(base, slots) -> None:
    some = {
        None: {},
        "inner": {by_trips(base, base[1])[INNER].node: 1},
        "outer": {by_trips(base, base[1])[OUTER].node: 2},
    }[slots]
    made = changed(base, all_states(MinCut(), some))
    both = emitted(made)
    found = jax.jit(lambda *xs: evaluate(both, xs))(W, X, np.float64(1))
    close(found, [loss(W, X), *jax.grad(loss, (0, 1))(W, X)])
