"""The loops that are worth restructuring, chosen by the bytes that they save."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform.interpret.joint import analyze
from xform.planner.candidates.large_loops import (
    inner_loops,
    keep_large,
    large_loops,
    loop_nodes,
    loops_around,
    planned_loops,
    reshaped_nodes,
)
from xform.planner.costs.saved_values import device_bytes, expand_token
from xform.planner.decide import schedule
from xform.planner.loops import loops, reshape_loops
from xform.planner.problem import Problem
from xform.policies import MinCut
from xform.program.ir import trace

W, X = np.ones((12, 4, 4), np.float32) / 3, np.ones((32, 4), np.float32)
MASKS = (True, True), (True,)


def layer(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) @ w.T)


def long(x, w):
    return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


def several(w, x):
    """A long loop, one of three iterations, one inside a loop, and one without a derivative."""
    count = lax.scan(lambda n, _: (n + 1, None), 0, None, length=50)[0]
    x = long(x, w) + lax.convert_element_type(count, jnp.float32)
    x = lax.scan(lambda x, w: (layer(x, w), None), x, w[:3])[0]
    return jnp.sum(lax.scan(lambda x, _: (long(x, w), None), x, None, length=5)[0] ** 2)


PROG = trace(lambda *xs: [several(*xs)], W, X)
LENGTHS = [eqn.params["length"] for eqn in loops(PROG)]


def most(prog):
    return schedule(analyze(prog, *MASKS), MinCut(), backend="cpu")


def test_planned_loops_lists_each_differentiated_loop_with_its_run_count() -> None:
    assert LENGTHS == [50, 12, 3, 5, 12]
    met = planned_loops(most(PROG), PROG)
    assert {i: (x.node.iterations, x.runs, x.inner) for i, x in met.items()} == {
        1: (12, 1, False), 2: (3, 1, False), 3: (5, 1, False), 4: (12, 5, True)
    }  # fmt: skip


def test_large_are_those_of_some_trips_that_keep_a_twentieth() -> None:
    met = planned_loops(most(PROG), PROG)
    size = lambda x: device_bytes(expand_token(x.node, x.schedules))
    for whole in (0, *map(size, met.values()), 10**9):
        expected = {i for i, x in met.items() if x.node.iterations >= 4 and 20 * size(x) > whole}
        assert keep_large(met, whole).keys() == expected
    assert large_loops(Problem(PROG, *MASKS)).keys() == {1, 3}
    assert inner_loops(Problem(PROG, *MASKS)).keys() == {4}
    assert {i: n.iterations for i, n in loop_nodes(inner_loops(Problem(PROG, *MASKS))).items()} == {
        4: 12
    }


def test_loops_around_maps_an_inner_loop_to_its_enclosing_loop() -> None:
    outer, inner = (loop_nodes(of(Problem(PROG, *MASKS))) for of in (large_loops, inner_loops))
    assert loops_around(PROG, outer, inner) == {3: outer[3]}
    assert loops_around(PROG, outer, {}) == {}
    assert loops_around(PROG, {1: outer[1]}, inner) == {}


def test_a_loop_in_a_region_is_an_inner_one() -> None:
    f = lambda w, x: [jnp.sum(jax.checkpoint(long)(jnp.cos(x), w) ** 2)]
    prog = trace(f, W, X)
    assert (large_loops(Problem(prog, *MASKS)), inner_loops(Problem(prog, *MASKS)).keys()) == (
        {},
        {0},
    )


def test_in_other_shapes_the_outermost_stand_for_those_that_they_were() -> None:
    shapes = {1: ((3, 4),), 3: ((2,), (3,))}
    now = most(reshape_loops(PROG, shapes))
    found = reshaped_nodes(now, PROG, shapes, {1, 3})
    assert [node.iterations for node in found] == [3, 2, 3]
    inner = reshaped_nodes(now, PROG, shapes, {4})
    assert [node.iterations for node in inner] == [12, 12]


def test_a_program_without_loops_has_none() -> None:
    prog = trace(lambda w, x: [jnp.sum(layer(x, w[0]))], W, X)
    assert planned_loops(most(prog), prog) == {}
    assert large_loops(Problem(prog, *MASKS)) == inner_loops(Problem(prog, *MASKS)) == {}
