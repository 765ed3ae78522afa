"""Plans whose loops are taken apart: what they keep, and that they compute the same."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.emitted import emitted
from xform.interpret.joint import analyze
from xform.ir import evaluate, trace
from xform.planner.liveness import liveness
from xform.planner.nested import nested
from xform.planner.outcome import again_flops, kept_bytes, least_bytes, waiting_bytes
from xform.planner.saved import plan
from xform.planner.split import split
from xform.planner.states import stored
from xform.planner.whole import large_loops
from xform.policies import MinCut, save_everything

TRIPS = 24
W, X = jnp.ones((TRIPS, 16, 16)) / 17, jnp.ones((8, 16)) / 3


def loss(w, x):
    step = lambda x, w: (x + jnp.tanh(jnp.sin(x @ w) @ w.T), jnp.sum(x))
    x, sums = lax.scan(step, x, w)
    return jnp.sum(x**2) + jnp.sum(sums)


ENDS = trace(lambda *xs: [loss(*xs)], W, X), (True, True), (True,)
MOST = plan(analyze(*ENDS), MinCut(), top=True)
LEAST = plan(analyze(*ENDS), MinCut(0.0, 0.0), top=True)


def right(whole) -> None:
    """The gradient is JAX's."""
    got = evaluate(emitted(whole.how), [W, X, jnp.ones(())])[1:]
    want = jax.grad(loss, (0, 1))(W, X)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


def test_split_loops_lie_between_their_two_plans() -> None:
    found = [*split(*ENDS, MOST, LEAST)]
    assert len(found) > 10
    works, kept = [w.work for w in found], [kept_bytes(w.how) for w in found]
    assert works == sorted(works)
    assert kept == sorted(kept, reverse=True)
    assert kept_bytes(LEAST) < min(kept) < max(kept) < kept_bytes(MOST)
    assert all(sum(n for (n,) in w.shapes[0]) == TRIPS for w in found)
    for whole in found[::5]:
        right(whole)


def test_loops_of_loops_keep_less_than_the_loop_as_it_is() -> None:
    found = [*nested(*ENDS)]
    assert min(waiting_bytes(w.how) for w in found) < waiting_bytes(LEAST)
    for whole in found:
        right(whole)


def test_fewer_stored_states_keep_less_and_run_more_again() -> None:
    series = [[*one] for one in stored(*ENDS)]
    assert len(series) >= 2
    for one in series:
        works, kept = [w.work for w in one], [waiting_bytes(w.how) for w in one]
        assert works == sorted(works)
        assert kept == sorted(kept, reverse=True)
    for whole in itertools.chain(*(one[::8] for one in series)):
        right(whole)


def test_small_loops_are_left_alone() -> None:
    short = lambda w, x: jnp.sum(lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w[:3])[0])
    ends = trace(lambda *xs: [short(*xs)], W, X), (True, True), (True,)
    assert large_loops(*ends)[1] == {}
    assert [*nested(*ends)] == stored(*ends) == []


@pytest.mark.parametrize("policy", [MinCut(), MinCut(0.0, 0.0), save_everything])
def test_no_plan_takes_less_than_what_it_keeps(policy) -> None:
    how = plan(analyze(*ENDS), policy, top=True)
    assert least_bytes(how) <= liveness(how, "cpu").total_bytes
    assert again_flops(how) == 0 or policy == MinCut(0.0, 0.0)
