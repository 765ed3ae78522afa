"""The backward pass visits every step once, at its own state, for any number of slots."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.parameters import slow
from xform.interpret.checkpoints import (
    _distance,
    in_lanes,
    known_length_trail,
    run_and_store,
    run_backward,
)
from xform.interpret.slots import _known_distance, slot_of_each_step, steps_run

LENGTHS = (*range(12), 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 333)


@partial(jax.jit, static_argnums=(1, 2))
def trodden(length, n, called=None):
    """Return the last state, and how often a step was pulled back at a wrong state.

    A state holds the number of steps twice; only the first copy is stored.
    """

    def step(x):
        if called is not None:
            jax.debug.callback(called)
        return [lax.add(v, jnp.int32(1)) for v in x]

    end, trail = run_and_store(
        lambda x: lax.lt(x[0], length), step, [jnp.int32(0), jnp.int32(0)], (True, False), n
    )

    def pull(x, after, cts):
        expected, wrong = cts
        right = lax.bitwise_and(lax.eq(x[0], expected - 1), lax.eq(after[0], expected))
        return [x[0], wrong + 1 - right.astype(jnp.int32)], [jnp.int32(1)]

    ways = in_lanes(trail.lane_steps, step, pull)
    cts, sums = run_backward(trail, end[:1], (True,), *ways, [length, jnp.int32(0)], [jnp.int32(0)])
    return end, cts, sums


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33, 100])
def test_every_step_is_pulled_back_once_and_from_its_own_state(n) -> None:
    for length in LENGTHS:
        end, (first, wrong), (steps,) = trodden(jnp.int32(length), n)
        assert [int(v) for v in end] == [length, length]
        assert (int(first), int(wrong), int(steps)) == (0, 0, length), length


@pytest.mark.parametrize(
    ("n", "length", "again"),
    [(32, 32, 0), (32, 100, 0.9), (32, 1000, 1.6), (4, 100, 3.1), (100, 1000, 0.9), (1, 40, 19.5)],
)
def test_steps_are_run_again_as_often_as_documented(n, length, again) -> None:
    runs = []
    jax.block_until_ready(trodden(jnp.int32(length), n, lambda: runs.append(1)))
    jax.effects_barrier()
    assert len(runs) / length - 1 == pytest.approx(again, abs=0.05)


@pytest.mark.parametrize("n", [1, 2, 5, 32, 1500])
def test_next_checkpoint_is_between_the_next_and_the_last_step(n) -> None:
    lengths = np.array([2, 3, 4, 7, 30, 1000, 10**6, 2**31 - 1], np.int32)
    frees = np.unique(np.clip([0, 1, 2, 3, 10, n - 1], 0, n - 1)).astype(np.int32)
    each = jax.vmap(jax.vmap(partial(_distance, n=n), (None, 0)), (0, None))
    found = np.asarray(each(lengths, frees), np.int64)
    assert (found >= 1).all()
    assert (found <= lengths[:, None] - 1).all()
    assert (found[:, 0] == lengths - 1).all()  # up to the last step, with no free slot


@cache
def fewest(length: int, n: int) -> int:
    """Return the fewest steps to reach each state, trying every place of the next stored state."""
    if length < 2:
        return 0
    if n == 1:
        return length * (length - 1) // 2
    return min(k + fewest(length - k, n - 1) + fewest(k, n) for k in range(1, length))


@partial(jax.jit, static_argnums=(0, 1, 2))
def retraced(length, n, called):
    """Return the steps that were pulled back at their own states, for a loop of known length."""

    def count(i, x):
        jax.debug.callback(called)
        return [x[0] + 1]

    def pull(i, x, after, cts, sums):
        return [cts[0] - 1], [sums[0] + ((x[0] == i) & (cts[0] == i + 1))]

    steps = jnp.arange(length, dtype=jnp.int32)
    slots = jnp.zeros(n + 1, jnp.int32).at[slot_of_each_step(length, n)].set(steps)
    trail = known_length_trail(length, n, [slots])
    return run_backward(trail, [], (False,), count, pull, [jnp.int32(length)], [jnp.int32(0)])


@pytest.mark.parametrize("n", slow([1, 2, 3, 5, 8, 40], 2, 5, 8))
def test_a_loop_of_known_length_takes_the_fewest_steps(n) -> None:
    for length in (1, 2, 3, 4, 7, 10, 21, 36):
        runs: list[int] = []
        (first,), (right,) = retraced(length, n, partial(runs.append, 1))
        jax.effects_barrier()
        assert (int(first), int(right)) == (0, length), length
        # The forward pass runs all steps except the last.
        assert len(runs) + length - 1 == steps_run(length, n) == fewest(length, n), length


def test_the_way_forward_and_the_way_back_part_alike() -> None:
    for n in (1, 2, 5, 40):
        for length in (2, 3, 10, 100, 1000):
            for free in {0, n // 2, n - 1}:
                if n > 2 or length < 30:  # beyond that, counts that are not in the table
                    assert int(_distance(jnp.int32(length), jnp.int32(free), n)) == _known_distance(
                        length, free
                    ), (n, length, free)


def test_states_are_stored_under_a_mesh_of_explicit_axes() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = lambda x, *axes: jax.device_put(
        x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    )
    ws = place(jax.random.normal(jax.random.key(0), (12, 16, 16)) / 4)
    x = place(jax.random.normal(jax.random.key(1), (512, 16)), "data")
    loss = lambda ws, x: jnp.mean(lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, ws)[0])
    with jax.set_mesh(mesh):
        plan = xform.plan(loss, ws, x, policy="budget:60KiB", verify=False)
        assert any(decision["snapshots"] for decision in plan.record.decisions)
        got = jax.jit(xform.grad(loss, policy=plan))(ws, x)
        want = jax.jit(jax.grad(loss))(ws, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
