"""Loops of loops: their saved bytes are counted by hand, and their values do not change."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.planner.candidates.test_whole import ENDS, LEAST, TRIPS, right
from xform.planner.candidates.nested import nested_candidates
from xform.planner.costs.outcome import recompute_flops, residual_bytes, saved_bytes
from xform.planner.problem import Problem
from xform.program.ir import trace

W, X = jnp.asarray(np.eye(16)), jnp.asarray(np.ones((8, 16)) / 3)


def of(f, x=X):
    return [*nested_candidates(Problem(trace(lambda x: [f(x)], x), (True,), (True,)))]


def loop(length: int):
    step = lambda x, _: (jnp.sin(jnp.sin(x @ W) @ W), None)
    return lambda x: jnp.sum(lax.scan(step, x, None, length=length)[0])


def test_nested_loops_save_less_than_the_unchanged_loop() -> None:
    found = [*nested_candidates(Problem(*ENDS))]
    assert min(residual_bytes(w.schedule) for w in found) < residual_bytes(LEAST)
    for whole in found:
        right(whole)
        assert sum(map(math.prod, whole.shapes[0])) == TRIPS


def test_the_outer_loop_keeps_its_states_and_the_inner_one_is_run_again() -> None:
    """Each level adds one recompute for the iterations inside it."""
    product, state = 2 * 8 * 16 * 16, X.nbytes
    for whole in of(loop(64)):
        outer, *rest = whole.shapes[0]
        assert not rest
        depth = len(outer) - 1
        assert depth >= 1
        again = recompute_flops(whole.schedule)
        # Two products in a step, and at most three elementwise operations.
        assert 64 * 2 * product <= again <= (depth + 1) * 64 * (2 * product + 4 * X.size)
        assert outer[0] * state <= saved_bytes(whole.schedule) <= (outer[0] + 1) * state
        assert residual_bytes(whole.schedule) < 64 * state


def test_more_levels_keep_less() -> None:
    least = {}
    for whole in of(loop(512)):
        depth = len(whole.shapes[0][0])
        least[depth] = min(least.get(depth, math.inf), residual_bytes(whole.schedule))
    assert list(least) == [2, 3, 4]
    assert least[2] > least[3] > least[4]


def test_short_loops_and_none_are_left_alone() -> None:
    assert of(loop(3)) == of(loop(1)) == of(loop(0)) == []
    assert of(lambda x: jnp.sum(jnp.sin(x))) == []
    assert of(loop(16), jnp.ones((0, 16))) == []
