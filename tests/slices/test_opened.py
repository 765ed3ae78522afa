"""Remat regions that a region in slices does not touch stay as their author marked them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform.passes.structured import is_remat_region
from xform.program.ir import evaluate, trace
from xform.slices.loop import run_in_slices
from xform.slices.opened import opened
from xform.slices.region import find_region
from xform.slices.rewrite import with_loop

ROWS, WIDTH, WORDS = 256, 16, 1024


def layer(h: Any, w: Any) -> Any:
    return jnp.sort(jnp.tanh(h @ w), 0)  # a sort over the rows ends a region in slices of rows


def loss(v: Any, w: Any, head: Any, h: Any) -> Any:
    for x in (v, w):
        h = jax.checkpoint(jax.jit(layer))(h, x)
    rows = jax.checkpoint(lambda h: jax.nn.logsumexp(h @ head, -1))(h)
    return jnp.sum(rows)


def arguments() -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / 4, "float32")
    return normal(WIDTH, WIDTH), normal(WIDTH, WIDTH), normal(WIDTH, WORDS), normal(ROWS, WIDTH)


def test_only_the_region_of_the_logits_is_opened() -> None:
    args = arguments()
    prog = trace(lambda *xs: [loss(*xs)], *args)
    assert sum(map(is_remat_region, prog.equations)) == 3
    flat = opened(prog)
    assert not any(map(is_remat_region, flat.equations))
    (logits,) = [y for e in flat.equations for y in e.outvars if y.aval.shape == (ROWS, WORDS)][:1]
    region = find_region(flat, logits, 0, 8)
    assert region is not None
    new = with_loop(region, run_in_slices)
    assert sum(map(is_remat_region, new.equations)) == 2
    results = [jax.jit(lambda *xs, p=p: evaluate(p, xs))(*args) for p in (prog, new)]
    np.testing.assert_allclose(*results, rtol=1e-5)
    gradient = lambda p: jax.jit(jax.grad(lambda *xs: evaluate(p, xs)[0], (0, 1, 2)))(*args)
    for a, b in zip(gradient(prog), gradient(new), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def check_in_slices(f: Any) -> None:
    """Compare a program whose product runs in slices with the program itself."""
    args = jnp.ones((64, 8)), jnp.ones((8, 512))
    flat = opened(trace(lambda *xs: [f(*xs)], *args))
    (large,) = [y for e in flat.equations for y in e.outvars if y.aval.shape == (64, 512)][:1]
    region = find_region(flat, large, 0, 4)
    assert region is not None
    new = with_loop(region, run_in_slices)
    np.testing.assert_allclose(evaluate(new, args)[0], f(*args), rtol=1e-5)


def test_a_region_without_a_result_of_its_own_stays_open() -> None:
    def f(x: Any, w: Any) -> Any:
        y, same = jax.checkpoint(lambda x: (jnp.sort(x), x))(x)
        return jnp.sum(jnp.sin(same @ w)) + y[0, 0]

    check_in_slices(f)


def test_slicing_beside_a_remat_region_with_unused_operand_keeps_values() -> None:
    def f(x: Any, w: Any) -> Any:
        y = jax.checkpoint(lambda x, unused: jnp.sort(x))(x, jnp.sin(x[:, :3]))
        return jnp.sum(jnp.sin(y @ w))

    check_in_slices(f)


@pytest.mark.parametrize("policy", ["slices:budget:600KiB"])
def test_layers_outside_the_sliced_region_are_still_rematerialized(policy: str) -> None:
    args = arguments()
    plan = xform.plan(loss, *args, argnums=(0, 1, 2), policy=policy)
    assert plan.slices
    assert plan.recompute_flops >= 2 * 2 * ROWS * WIDTH * WIDTH  # both layers
    g = jax.jit(xform.grad(loss, (0, 1, 2), policy=plan))(*args)
    for a, b in zip(g, jax.grad(loss, (0, 1, 2))(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
