"""Windows of time in which values are idle, counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.planner.cuts.test_integer_program import joint_of
from xform.interpret.cost import equation_flops
from xform.planner.costs.link import HostLink
from xform.planner.costs.window import offloadable_values
from xform.planner.decide import schedule
from xform.policies import MinCut

N = 64
PRODUCT = 2 * N**3


def waits(f, link: HostLink, *args):
    """Return the Joint of a function, and the values that may be offloaded."""
    joint = joint_of(f, *args)
    may = offloadable_values(schedule(joint, MinCut(), "cpu"), link)
    return joint, may


def taking(seconds: float) -> HostLink:
    """Return a link that takes this long for both ways, for any size; a FLOP takes a second."""
    return HostLink(1.0, float("inf"), latency_seconds=seconds / 2)


def test_a_window_is_the_work_between_two_uses() -> None:
    """Three products in a row: the gradient of the next weights reads a layer's result."""

    def f(w, x):
        for _ in range(3):
            x = jnp.sin(x @ w)
        return jnp.sum(x)

    w = jnp.ones((N, N))
    for products, n in ((0, 3), (0.5, 2), (2.5, 1), (3.5, 1), (5.5, 0)):
        joint, may = waits(f, taking(products * PRODUCT), w, w)
        dots = [e.outvars[0] for e in joint.forward if e.primitive.name == "dot_general"]
        assert [v in may.values for v in dots] == [True] * n + [False] * (3 - n)
    joint, may = waits(f, taking(0.0), w, w)
    assert may.seconds == sum(map(equation_flops, joint.forward))


@pytest.mark.parametrize("trips", [1, 4])
def test_idle_window_in_a_loop_is_that_of_the_middle_iteration(trips: int) -> None:
    def f(w, x):
        step = lambda x, _: (jnp.sin(x @ w), None)
        return jnp.sum(lax.scan(step, x, None, length=trips)[0])

    w = jnp.ones((N, N))
    around = (trips - 1) / 2 * 3 * PRODUCT

    def within(seconds: float) -> bool:
        joint, may = waits(f, taking(seconds), w, w)
        (body,) = [e.params["node"].joints[0] for e in joint.forward if "node" in e.params]
        (dot,) = [e.outvars[0] for e in body.forward if e.primitive.name == "dot_general"]
        return dot in may.values

    assert within(around)
    assert not within(around + PRODUCT / 2)


def test_prng_keys_and_devices_without_a_link_are_not_offloaded() -> None:
    def f(w, key):
        return jnp.sum(w @ jax.random.normal(jax.random.fold_in(key, 1), (N, N)))

    w = jnp.ones((N, N))
    joint = joint_of(lambda w: f(w, jax.random.key(0)), w)
    how = schedule(joint, MinCut(), "cpu")
    kinds = {str(v.aval.dtype) for v in offloadable_values(how, taking(0.0)).values}
    assert kinds
    assert not [k for k in kinds if k.startswith("key")]
    assert offloadable_values(how, None).values == frozenset()


def test_the_state_of_a_loop_waits_from_its_trip_to_its_way_back() -> None:
    def f(w, x):
        step = lambda x, _: (jnp.sin(x @ w), None)
        return jnp.sum(lax.scan(step, x, None, length=4)[0])

    w = jnp.ones((N, N))
    # In an iteration: its product, then the cotangents of state and weights; the latter reads it.
    around = 3 / 2 * 3 * PRODUCT

    def within(seconds: float) -> bool:
        joint, may = waits(f, taking(seconds), w, w)
        (body,) = [e.params["node"].joints[0] for e in joint.forward if "node" in e.params]
        return not may.values.isdisjoint(body.inputs)

    assert within(around + PRODUCT)
    assert not within(around + 3.5 * PRODUCT)
