"""Every step is gone back over once, from its own state, whatever the number of slots."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xform.interpret.checkpoints import _split, back, sweep

LENGTHS = (*range(12), 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 333)


@partial(jax.jit, static_argnums=(1, 2))
def trodden(length, n, called=None):
    """The last state, and how often a step was pulled back from a state that is not its own.

    A state is the number of steps taken, and as much twice: what was stored and what was not.
    """

    def step(x):
        if called is not None:
            jax.debug.callback(called)
        return [lax.add(v, 1) for v in x]

    end, trail = sweep(
        lambda x: lax.lt(x[0], length), step, [jnp.int32(0), jnp.int32(0)], (True, False), n
    )

    def pull(x, after, cts):
        expected, wrong = cts
        right = lax.bitwise_and(lax.eq(x[0], expected - 1), lax.eq(after[0], expected))
        return [x[0], wrong + 1 - right.astype(int)], [jnp.int32(1)]

    cts, sums = back(trail, end[:1], (True,), step, pull, [length, jnp.int32(0)], [jnp.int32(0)])
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
def test_the_next_state_lies_between_this_one_and_the_last_step(n) -> None:
    lengths = np.array([2, 3, 4, 7, 30, 1000, 10**6, 2**31 - 1], np.int32)
    frees = np.unique(np.clip([0, 1, 2, 3, 10, n - 1], 0, n - 1)).astype(np.int32)
    each = jax.vmap(jax.vmap(partial(_split, n=n), (None, 0)), (0, None))
    found = np.asarray(each(lengths, frees), np.int64)
    assert (found >= 1).all()
    assert (found <= lengths[:, None] - 1).all()
    assert (found[:, 0] == lengths - 1).all()  # with no free slot, to the last
