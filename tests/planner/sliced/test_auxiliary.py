"""A loss in slices that returns other values too, such as its logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform.errors import NotDifferentiable
from xform.planner.sliced.loss import _tangents_of_pullback, loss_position
from xform.program.ir import trace
from xform.slices.candidates import choices
from xform.slices.opened import opened

ROWS, WIDTH, WORDS = 256, 16, 2048


def with_logits(w: Any, h: Any, y: Any) -> Any:
    logits = h @ w
    picked = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked), logits


def with_metrics(w: Any, h: Any, y: Any) -> Any:
    value, logits = with_logits(w, h, y)
    right = jnp.mean(jnp.argmax(logits, -1) == y)
    return value, {"largest": logits.max(-1), "square": jnp.sum(logits**2), "right": right}


def with_sum_of_logits(w: Any, h: Any, y: Any) -> Any:
    """The value depends on the logits outside the loop, too."""
    value, logits = with_logits(w, h, y)
    return value + jnp.sort(logits.ravel())[0], logits


def data() -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    h = jnp.asarray(random.normal(size=(ROWS, WIDTH)), "float32")
    w = jnp.asarray(random.normal(size=(WIDTH, WORDS)) / 4, "float32")
    return w, h, jnp.asarray(random.integers(0, WORDS, ROWS), "int32")


def close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), got, want)


def half(derivative: Any) -> xform.policies.Budget:
    """Return a budget with slices: half of the temporary memory of a derivative."""
    figures: Any = jax.jit(derivative).lower(*data()).compile().memory_analysis()
    whole = figures.argument_size_in_bytes + figures.output_size_in_bytes
    return xform.policies.budget(whole + figures.temp_size_in_bytes // 2, slices=True)


def sliced_plan(f: Any) -> xform.Plan:
    policy = half(jax.grad(f, has_aux=True))
    return xform.plan(f, *data(), has_aux=True, policy=policy)


@pytest.mark.parametrize("f", [with_logits, with_metrics])
def test_value_and_gradient_run_in_one_loop(f: Any) -> None:
    args, plan = data(), sliced_plan(f)
    assert plan.recompute_flops == 0
    assert "value and gradient in one loop" in plan.sliced_regions[0]
    for lib in (jax.jit, lambda g: g):
        want = jax.value_and_grad(f, (0, 1), has_aux=True)
        ours = xform.value_and_grad(f, (0, 1), has_aux=True, policy=half(want))
        close(lib(ours)(*args), want(*args))
    close(jax.jit(xform.grad(f, has_aux=True, policy=plan))(*args),
          jax.grad(f, has_aux=True)(*args))  # fmt: skip


@pytest.mark.parametrize("f", [with_logits, with_metrics])
@pytest.mark.parametrize("lib", [jax, xform])
def test_the_other_values_have_derivatives(f: Any, lib: Any) -> None:
    """A function of the gradient and of the other values is differentiated once more."""
    args, plan = data(), sliced_plan(f)

    def outer(gradient_of: Any) -> Any:
        def run(w: Any, h: Any) -> Any:
            gradient, others = gradient_of(w, h, args[2])
            floats = [x for x in jax.tree.leaves(others) if x.ndim]
            return jnp.sum(gradient**2) + sum(jnp.mean(jnp.sin(x)) for x in floats)

        return run

    ours = outer(xform.grad(f, has_aux=True, policy=plan))
    want = outer(jax.grad(f, has_aux=True))
    close(jax.jit(lib.grad(ours, (0, 1)))(*args[:2]), jax.jit(jax.grad(want, (0, 1)))(*args[:2]))
    along = lambda g: lib.jvp(g, args[:2], args[:2])[1]
    close(jax.jit(lambda: along(ours))(), jax.jit(lambda: jax.jvp(want, args[:2], args[:2])[1])())


def test_a_value_that_reads_the_logits_outside_is_no_loss_in_slices() -> None:
    prog = opened(trace(lambda *xs: list(with_sum_of_logits(*xs)), *data()))
    for choice in choices(prog):
        for wanted in ((True, False), None):
            assert loss_position(choice.regions[-1], wanted) is None
    prog = opened(trace(lambda *xs: list(with_logits(*xs)), *data()))
    found = [loss_position(c.regions[-1], (True, False)) for c in choices(prog)]
    assert any(position is not None for position in found)
    assert all(loss_position(c.regions[-1]) is None for c in choices(prog))


@jax.custom_vjp
def cross_entropy(logits: Any, y: Any) -> Any:
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], 1)[:, 0]


cross_entropy.defvjp(
    lambda logits, y: (cross_entropy(logits, y), (jax.nn.softmax(logits), y)),
    lambda kept, ct: (ct[:, None] * (kept[0] - jax.nn.one_hot(kept[1], WORDS)), None),
)


def with_a_rule_of_its_own(w: Any, h: Any, y: Any) -> Any:
    """A loss as MaxText's: it has a `custom_vjp`, and returns metrics that depend on it."""
    losses = cross_entropy(h @ w, y)
    return jnp.mean(losses), {"total": jnp.sum(losses)}


def test_a_loss_without_forward_mode_runs_in_slices_and_returns_metrics() -> None:
    f, args = with_a_rule_of_its_own, data()
    plan = sliced_plan(f)
    assert "value and gradient in one loop" in plan.sliced_regions[0]
    want = jax.value_and_grad(f, (0, 1), has_aux=True)
    ours = xform.value_and_grad(f, (0, 1), has_aux=True, policy=half(want))
    for lib in (jax.jit, lambda g: g):
        close(lib(ours)(*args), want(*args))
    in_slices = lambda w: xform.grad(f, has_aux=True, policy=plan)(w, *args[1:])[1]["total"]
    with pytest.raises(NotDifferentiable, match="custom_vjp"):
        jax.jit(lambda w: xform.jvp(in_slices, (w,), (w,)))(args[0])


def test_tangents_of_a_pullback_can_be_transposed() -> None:
    f = lambda w, h: [jnp.sin(w) * h.sum(), jnp.cos(w @ w), jnp.sum(w**2)]
    w, h = jnp.arange(9.0).reshape(3, 3) / 9, jnp.ones(4)
    wanted = (True, False, True)
    tangents = lambda dw: _tangents_of_pullback(trace(f, w, h), wanted, [w, h], [dw, None], "here")
    cts = [jnp.full((3, 3), 2.0), jnp.zeros((3, 3)), jnp.float32(3)]
    (ours,) = xform.linear_transpose(tangents, w)(cts)
    close(ours, jax.vjp(f, w, h)[1](cts)[0])
