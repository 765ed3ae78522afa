"""`clip_by_previous_global_norm`, alone and in a fused update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xform
from tests.fused.test_fused_update import (
    assert_close,
    run,
    scanned,
    separate,
    temporary_bytes,
    tied,
)
from xform import errors


def test_gradients_are_clipped_by_the_norm_of_the_previous_step() -> None:
    clip = xform.clip_by_previous_global_norm(2.0)
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}
    first, state = clip.update(grads, clip.init(grads))
    assert_close(first, grads)
    assert float(state.norm) == 5.0
    small = {"a": jnp.array([0.5, 0.0]), "b": jnp.array(0.0)}
    second, state = clip.update(small, state)
    np.testing.assert_allclose(second["a"], [0.2, 0.0])
    third, _ = clip.update(small, state)
    assert_close(third, small)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_the_largest_norm_is_positive(max_norm: float) -> None:
    with pytest.raises(errors.WrongArgument, match="must be positive"):
        xform.clip_by_previous_global_norm(max_norm)


def test_clipping_equals_optax_for_an_unchanged_norm() -> None:
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}
    ours = xform.clip_by_previous_global_norm(2.0, first_norm=5.0)
    theirs = optax.clip_by_global_norm(2.0)
    assert_close(
        ours.update(grads, ours.init(grads))[0], theirs.update(grads, theirs.init(grads))[0]
    )


def test_fused_steps_have_the_norms_of_separate_ones() -> None:
    loss, params, tokens = tied()
    optimizer = optax.chain(xform.clip_by_previous_global_norm(0.01), optax.adam(0.1))
    start = params, optimizer.init(params), tokens
    fused = xform.fused_update(loss, optimizer)
    ours = run(jax.jit(fused), *start)
    assert_close(ours, run(jax.jit(separate(loss, optimizer)), *start))
    assert float(ours[1][0].norm) > 0.01
    places = {row.name: row.place for row in fused.where(*start).rows}
    assert places["['layers']['w']"] == "backward loop"


def test_the_norm_needs_no_stack_of_gradients() -> None:
    loss, params = scanned(16, 128)
    optimizer = optax.chain(xform.clip_by_previous_global_norm(1.0), optax.sgd(0.1))
    start = params, optimizer.init(params), jnp.ones((16, 128))
    fused = temporary_bytes(xform.fused_update(loss, optimizer, policy="save_nothing"), *start)
    assert fused < 16 * 16 * 128 * 4 + 3 * params.nbytes / 16
