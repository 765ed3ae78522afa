"""A budget with slices for a step that takes several derivatives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform.errors import BudgetInfeasible
from xform.policies import budget

ROWS, WIDTH, WORDS = 512, 32, 2048


def loss(w: Any, h: Any, y: Any) -> Any:
    logits = h @ w
    picked = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def two_losses(w: Any, h: Any, y: Any) -> Any:
    """Take two steps, each with the gradient of a loss over many words."""
    w = w - 0.1 * xform.grad(loss)(w, h, y)
    return w - 0.1 * xform.grad(lambda w: loss(w, jnp.sin(h), y) ** 2)(w)


def one_large(w: Any, h: Any, y: Any) -> Any:
    """Take a step with the gradient of a large loss, and another with that of a small one."""
    w = w - 0.1 * xform.grad(loss)(w, h, y)
    return w - 0.1 * xform.grad(lambda w: jnp.sum(w**2) ** 0.5)(w)


def cumulative(w: Any, h: Any, y: Any) -> Any:
    """Take two gradients of a loss that no slices compute: it adds up along both axes."""
    f = lambda w, h: jnp.sum(jnp.cumsum(jnp.cumsum(jnp.sin(h @ w), 0), 1) ** 2)
    return w - 0.1 * xform.grad(f)(w, h) - 0.1 * xform.grad(lambda w: f(w, jnp.sin(h)))(w)


def data() -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / 4, "float32")
    return (normal(WIDTH, WORDS), normal(ROWS, WIDTH),
            jnp.asarray(random.integers(0, WORDS, ROWS), "int32"))  # fmt: skip


def total(step: Callable[..., Any]) -> int:
    figures: Any = jax.jit(step).lower(*data()).compile().memory_analysis()
    ends = figures.argument_size_in_bytes + figures.output_size_in_bytes
    return ends + figures.temp_size_in_bytes - figures.alias_size_in_bytes


@pytest.mark.parametrize(("step", "n"), [(two_losses, 2), (one_large, 1)])
def test_each_large_loss_gets_slices(step: Any, n: int) -> None:
    size = total(step) // 2
    planned = xform.jit(step, budget(size, slices=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = planned(*data())
    assert planned.plan.compiled_bytes <= size
    assert planned.plan.compiles <= 4
    plans = list(planned.plan)
    assert sum(bool(plan.sliced_regions) for plan in plans) == n
    assert sum(plan.recompute_flops for plan in plans) == 0
    np.testing.assert_allclose(got, jax.jit(step)(*data()), rtol=2e-5, atol=1e-7)


def test_a_step_that_fits_gets_no_slices() -> None:
    planned = xform.jit(two_losses, budget(2 * total(two_losses), slices=True))
    planned(*data())
    assert planned.plan.compiles == 1
    assert not any(plan.sliced_regions for plan in planned.plan)


def test_a_refusal_names_a_floor_that_is_kept() -> None:
    with pytest.raises(BudgetInfeasible) as refused:
        xform.jit(two_losses, budget(1000, slices=True))(*data())
    floor = refused.value.floor_bytes
    assert floor < total(two_losses) // 2
    planned = xform.jit(two_losses, budget(floor, slices=True))
    planned(*data())
    assert planned.plan.compiled_bytes <= floor


def test_a_step_without_losses_in_slices_saves_less() -> None:
    size = int(0.9 * total(cumulative))
    planned = xform.jit(cumulative, budget(size, slices=True))
    assert planned.lower(*data()).plan.compiled_bytes <= size
    got, want = planned(*data()), jax.jit(cumulative)(*data())
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.max(np.abs(want)))
