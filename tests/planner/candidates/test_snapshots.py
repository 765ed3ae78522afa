"""Loops that store the requested number of states, with the work that revolve needs for them."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from tests.planner.candidates.test_whole import ENDS, right
from xform.interpret.slots import steps_run
from xform.planner.candidates.snapshots import snapshot_candidates
from xform.planner.costs.outcome import recompute_flops, residual_bytes, saved_bytes
from xform.planner.problem import Problem
from xform.program.ir import trace

W, X = jnp.eye(16), jnp.ones((8, 16)) / 3


def of(f, x=X):
    return [
        [*one] for one in snapshot_candidates(Problem(trace(lambda x: [f(x)], x), (True,), (True,)))
    ]


def loop(length: int):
    step = lambda x, _: (jnp.sin(jnp.sin(x @ W) @ W), None)
    return lambda x: jnp.sum(lax.scan(step, x, None, length=length)[0])


def snapshots(whole) -> int:
    ((inner,),) = whole.schedule.inner.values()
    return inner.snapshots


def test_fewer_stored_states_keep_less_and_run_more_again() -> None:
    series = [[*one] for one in snapshot_candidates(Problem(*ENDS))]
    assert len(series) >= 2
    for one in series:
        works, kept = [w.work for w in one], [residual_bytes(w.schedule) for w in one]
        assert works == sorted(works)
        assert kept == sorted(kept, reverse=True)
    for whole in itertools.chain(*(one[::8] for one in series)):
        right(whole)


def test_single_steps_are_run_as_often_as_revolve_runs_them() -> None:
    product, trips = 2 * 8 * 16 * 16, 20
    single = [one for one in of(loop(trips)) if not one[0].shapes]
    assert len(single) == 2
    for whole in itertools.chain(*single):
        n = snapshots(whole)
        # The steps to each state, after the first forward pass; and both products in each step.
        steps = steps_run(trips, n) - (trips - 1) + trips
        assert recompute_flops(whole.schedule) == steps * 2 * product
        assert saved_bytes(whole.schedule) == (n + 1) * X.nbytes
    counts = [snapshots(whole) for whole in single[0]]
    assert (counts[0], counts[-1]) == (trips - 2, 1)
    assert counts == sorted(set(counts), reverse=True)


def test_loops_are_divided_into_whole_chunks_and_a_remainder() -> None:
    shapes = {one[0].shapes.get(0) for one in of(loop(70))}
    assert shapes == {None, ((17, 4), (2,)), ((4, 16), (6,))}
    # There are no plans with fewer than four chunks.
    assert {one[0].shapes.get(0) for one in of(loop(30))} == {None, ((7, 4), (2,))}


def test_short_loops_none_and_those_with_effects_are_left_alone() -> None:
    def printing(x, _):
        jax.debug.print("{}", x[0, 0])
        return jnp.sin(x), None

    effects = lambda x: jnp.sum(lax.scan(printing, x, None, length=16)[0])
    assert of(loop(3)) == of(loop(1)) == of(loop(0)) == of(lambda x: jnp.sum(jnp.sin(x))) == []
    assert [*itertools.chain(*of(effects))] == []
    assert of(loop(16), jnp.ones((0, 16))) == []
