"""Which operations of a compiled program belong to the forward and the backward pass."""

import jax
import jax.numpy as jnp
import pytest

import xform
from tests.memory.test_capacity import f32
from xform.memory.phases import _backward_ranges, _largest_range


def loss(ws, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)


def unrolled(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def names(f) -> list[str]:
    report = xform.memory_analysis(f, f32(6, 32, 32), f32(8, 32))
    phases = report.phases
    assert [p.first for p in phases[1:]] == [p.end for p in phases[:-1]]
    if phases:
        assert phases[0].first == 0
        assert phases[-1].end == len(report.live)
        assert report.to_dict()["phases"][0]["name"] == phases[0].name
    return [p.name for p in phases]


@pytest.mark.parametrize("f", [loss, unrolled])
def test_gradient_has_forward_and_backward_phases(f) -> None:
    assert names(xform.grad(f)) == ["forward", "backward"]


def test_operations_after_the_gradient_are_the_update_phase() -> None:
    def step(ws, x):
        gradient = jax.lax.optimization_barrier(xform.grad(loss)(ws, x))
        return ws - 0.1 * jnp.sign(gradient)

    assert names(step) == ["forward", "backward", "update"]


def test_function_without_a_derivative_has_no_phases() -> None:
    assert names(loss) == []


def test_single_operations_that_were_moved_change_nothing() -> None:
    votes = [-1, 1, -1, -1, -1, 1, 1, -1, 1, 1, 1, -1, -1]
    assert _largest_range(votes) == (5, 11)
    assert _largest_range([-1, -1]) == (0, 0)
    assert _largest_range([0, 1, 0]) == (0, 2)


def test_passes_of_several_derivatives() -> None:
    forward, again, backward = [-4] * 20, [1] * 10, [4] * 30
    moved = [4, *forward, *again, *backward, -4, -4, *backward]
    assert _backward_ranges(moved) == [(21, 93)]
    assert _backward_ranges(moved + moved) == [(21, 94), (114, 186)]
    assert _backward_ranges([*again, *forward, *backward]) == [(30, 60)]
    assert _backward_ranges([-4, 1, 4]) == [(1, 3)]
    assert _backward_ranges([-4, 0]) == []
