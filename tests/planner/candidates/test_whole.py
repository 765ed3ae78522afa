"""Plans of whole programs, and which of their loops are worth a change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.emitted import emitted
from tests.fuzz.evaluate import Machine
from xform import policies
from xform.interpret.joint import analyze
from xform.planner.candidate import Candidate
from xform.planner.candidates.large_loops import large_loops
from xform.planner.candidates.nested import nested_candidates
from xform.planner.candidates.snapshots import snapshot_candidates
from xform.planner.costs.outcome import peak_lower_bound, recompute_flops, saved_bytes
from xform.planner.decide import schedule
from xform.planner.problem import Problem
from xform.planner.simulate.liveness import liveness
from xform.policies import MinCut, save_everything
from xform.program.ir import evaluate, trace

TRIPS = 24
W, X = jnp.ones((TRIPS, 16, 16)) / 17, jnp.ones((8, 16)) / 3


def loss(w, x):
    step = lambda x, w: (x + jnp.tanh(jnp.sin(x @ w) @ w.T), jnp.sum(x))
    x, sums = lax.scan(step, x, w)
    return jnp.sum(x**2) + jnp.sum(sums)


ENDS = trace(lambda *xs: [loss(*xs)], W, X), (True, True), (True,)
MOST = schedule(analyze(*ENDS), MinCut(), backend="cpu")
LEAST = schedule(analyze(*ENDS), MinCut(0.0, 0.0), backend="cpu")


def right(whole) -> None:
    """Check that the gradient is JAX's."""
    prog, xs = emitted(whole.schedule), [W, X, jnp.ones(())]
    got = Machine().run(jax.make_jaxpr(lambda *xs: evaluate(prog, xs))(*xs), xs)[1:]
    want = jax.grad(loss, (0, 1))(W, X)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("trips", [0, 1, 3, 4, TRIPS])
def test_a_loop_is_large_from_four_trips_on(trips: int) -> None:
    f = lambda w, x: jnp.sum(lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w[:trips])[0])
    ends = trace(lambda *xs: [f(*xs)], W, X), (True, True), (True,)
    found = large_loops(Problem(*ends))
    assert [*found] == ([0] if trips >= 4 else [])
    if not found:
        assert [*nested_candidates(Problem(*ends))] == snapshot_candidates(Problem(*ends)) == []


def test_a_loop_that_keeps_little_of_all_is_not_large() -> None:
    def f(w, x):
        y = lax.scan(lambda y, w: (jnp.sin(y @ w), None), x[:1], w)[0]
        return jnp.sum(y) + sum(jnp.sum(jnp.sin(jnp.sin(x @ w[i]) @ w[i])) for i in range(8))

    wide = jnp.ones((256, 16))
    ends = trace(lambda *xs: [f(*xs)], W, wide), (True, True), (True,)
    kept = saved_bytes(schedule(analyze(*ends), MinCut(), backend="cpu"))
    assert 0.05 * kept > TRIPS * 2 * 16 * 4
    assert large_loops(Problem(*ends)) == {}


def test_candidates_are_ordered_by_recompute_then_offloaded_bytes() -> None:
    found = [Candidate(how, {}) for how in (MOST, LEAST)]
    assert [w.work for w in found] == [(0, 0), (recompute_flops(LEAST), 0)]
    offload = policies.offload_dots_with_no_batch_dims("device", "pinned_host")
    sent = Candidate(schedule(analyze(*ENDS), offload, backend="cpu"), {})
    assert found[0].work < sent.work < found[1].work


@pytest.mark.parametrize("policy", [MinCut(), MinCut(0.0, 0.0), save_everything])
def test_peak_lower_bound_is_at_most_the_liveness_peak(policy) -> None:
    how = schedule(analyze(*ENDS), policy, backend="cpu")
    assert peak_lower_bound(how, "cpu") <= liveness(how, "cpu").total_bytes
    assert recompute_flops(how) == 0 or policy == MinCut(0.0, 0.0)
