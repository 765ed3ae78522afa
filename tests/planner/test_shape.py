"""Loops in parts and in levels: the same values, and the fewest bytes of any such shape."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xform._jax import scan_p
from xform.planner.shape import fold_loop, loop_levels, scan_in_parts
from xform.program.ir import trace

STEPS = np.sin(np.arange(36.0, dtype=np.float32)).reshape(12, 3)
SHAPES = [((12,),), ((1,), (11,)), ((5,), (7,)), ((3, 4),), ((2, 3, 2),), ((2, 5), (2,)),
          ((12, 1),), ((1, 12),), ((1, 1), (11,))]  # fmt: skip


def scanned(reverse: bool, x, steps):
    step = lambda h, x: (jnp.tanh(h * 1.5 + x), h - x)
    return lax.scan(step, x, steps, reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_loop_in_another_shape_makes_the_same(shape, reverse: bool) -> None:
    start = np.cos(np.arange(3.0, dtype=np.float32))
    prog = trace(lambda *xs: jax.tree.leaves(scanned(reverse, *xs)), start, STEPS)
    (eqn,) = prog.equations
    found = scan_in_parts(eqn, [start, STEPS], shape)
    for ours, theirs in zip(found, jax.tree.leaves(scanned(reverse, start, STEPS)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    again = trace(lambda *xs: scan_in_parts(eqn, xs, shape), start, STEPS)
    outermost = sorted(e.params["length"] for e in again.equations if e.primitive is scan_p)
    assert outermost == sorted(next((n for n in part if n > 1), 1) for part in shape)


def test_a_shape_of_another_length_is_refused() -> None:
    (eqn,) = trace(lambda *xs: jax.tree.leaves(scanned(False, *xs)), STEPS[0], STEPS).equations
    with pytest.raises(ValueError, match="does not have the 12 steps of the loop"):
        scan_in_parts(eqn, [STEPS[0], STEPS], ((3, 3),))


def test_loop_levels_ignore_one_trip_loops_but_are_at_least_one() -> None:
    assert [loop_levels(trips) for trips in ((4,), (1,), (1, 1), (4, 1), (1, 4), (2, 3, 4))] == [
        1, 1, 1, 1, 1, 3
    ]  # fmt: skip


def kept(trips: tuple[int, ...], state: int, step: int) -> int:
    """Return the bytes of nested iterations: a state for each outer one, one level at a time."""
    *outer, inner = trips
    return sum(outer) * state + inner * step


@pytest.mark.parametrize(("length", "state", "step"), [(12, 4, 20), (30, 1, 100), (24, 50, 60)])
@pytest.mark.parametrize("depth", [1, 2])
def test_fold_loop_keeps_no_more_than_the_best_exact_factorization(length, depth, state, step):
    sizes = range(2, length + 1)
    exact = (t for t in itertools.product(sizes, repeat=depth + 1) if math.prod(t) == length)
    least = min(kept(trips, state, step) for trips in exact)
    shape, found = fold_loop(length, depth, state, step)
    assert sum(map(math.prod, shape)) == length
    assert found == kept(shape[0], state, step) + sum(n * step for (n,) in shape[1:])
    assert len(shape[0]) == depth + 1
    assert found <= least


def test_no_level_is_the_loop_itself() -> None:
    assert fold_loop(7, 0, 3, 5) == (((7,),), 35)
