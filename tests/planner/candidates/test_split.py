"""Loops split in two: between the two plans that they combine, with the same values."""

import jax.numpy as jnp
import pytest
from jax import lax

from tests.planner.candidates.test_whole import ENDS, LEAST, MOST, TRIPS, right
from xform.interpret.joint import analyze
from xform.planner.candidates.split import split_candidates
from xform.planner.costs.outcome import recompute_flops, saved_bytes
from xform.planner.decide import schedule
from xform.planner.problem import Problem
from xform.policies import MinCut
from xform.program.ir import trace

X = jnp.ones((8, 16)) / 3


def between(f):
    """Return two plans of a function of X, and the plans between them."""
    ends = trace(lambda x: [f(x)], X), (True,), (True,)
    joint = analyze(*ends)
    above, below = (schedule(joint, p, backend="cpu") for p in (MinCut(), MinCut(0.0, 0.0)))
    return above, below, [*split_candidates(Problem(*ends), above, below)]


def loop(length: int, reverse: bool = False):
    step = lambda x, _: (x + jnp.tanh(jnp.sin(x @ x.T) @ x), None)
    return lambda x: lax.scan(step, x, None, length=length, reverse=reverse)[0]


def test_split_loops_lie_between_their_two_plans() -> None:
    found = [*split_candidates(Problem(*ENDS), MOST, LEAST)]
    assert len(found) > 10
    works, kept = [w.work for w in found], [saved_bytes(w.schedule) for w in found]
    assert works == sorted(works)
    assert kept == sorted(kept, reverse=True)
    assert saved_bytes(LEAST) < min(kept) < max(kept) < saved_bytes(MOST)
    assert all(sum(n for (n,) in w.shapes[0]) == TRIPS for w in found)
    for whole in found[::5]:
        right(whole)


def test_each_iteration_of_a_split_loop_costs_what_its_plan_costs() -> None:
    step = (saved_bytes(MOST) - saved_bytes(LEAST)) // TRIPS
    work = recompute_flops(LEAST) // TRIPS
    for whole in split_candidates(Problem(*ENDS), MOST, LEAST):
        ((early,), (late,)) = whole.shapes[0]
        assert saved_bytes(whole.schedule) >= saved_bytes(LEAST) + late * step
        assert recompute_flops(whole.schedule) == early * work


@pytest.mark.parametrize(("length", "parts"), [(0, 0), (1, 0), (2, 1), (3, 2), (40, 15)])
def test_loop_is_split_at_distinct_positions_whose_parts_sum_to_its_length(
    length: int, parts: int
) -> None:
    _, _, found = between(lambda x: jnp.sum(loop(length)(x)))
    assert len(found) == parts
    splits = [w.shapes[0] for w in found]
    assert all(a > 0 and b > 0 and a + b == length for ((a,), (b,)) in splits)
    assert len(set(splits)) == parts


def test_all_loops_are_split_at_the_same_part() -> None:
    _, _, found = between(lambda x: jnp.sum(loop(8)(jnp.sin(loop(16, True)(x)))))
    assert len(found) == 15
    for whole in found:
        ((_,), (a,)), ((_,), (b,)) = whole.shapes[0], whole.shapes[1]
        assert abs(a / 16 - b / 8) <= 1 / 8


def test_without_a_loop_there_is_nothing_between() -> None:
    _, _, found = between(lambda x: jnp.sum(jnp.tanh(jnp.sin(x @ x.T) @ x)))
    assert found == []
