"""A region joins several sums into one if the program only adds linear functions of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform.planner.sliced.decision import in_slices
from xform.planner.sliced.loss import loss_position
from xform.program.ir import evaluate, trace
from xform.slices.candidates import choices
from xform.slices.decision import decision_for
from xform.slices.opened import opened
from xform.slices.region import Region

ROWS, WIDTH = 64, 16


def normal(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def vae(w: Any, x: Any) -> Any:
    """Return an error of a reconstruction and a divergence, each a mean over the rows."""
    code = jnp.tanh(x @ w)
    made = code @ w.T
    error = jnp.mean(jnp.sum((made - x) ** 2, -1))
    return error + 0.5 * jnp.mean(jnp.sum(code**2 - jnp.log1p(code**2), -1))


def small_code(w: Any, x: Any) -> Any:
    """Return the same with a small code: a region around the large values starts after it."""
    mean, spread = x @ w[:, :4], jnp.tanh(x @ w[:, 4:8])
    made = jnp.tanh((mean + 0.1 * spread) @ w[:, 8:12].T)
    error = jnp.mean(jnp.sum((jnp.exp(made) - x) ** 2, -1))
    return error + 0.5 * jnp.mean(jnp.sum(mean**2 - jnp.log1p(spread**2), -1))


def scaled_by_an_input(w: Any, x: Any, beta: Any) -> Any:
    y = jnp.sin(x @ w)
    return jnp.sum(y) / beta - jnp.sum(y**2) * jnp.exp(beta)


def three(w: Any, x: Any) -> Any:
    y = jnp.sin(x @ w)
    return -(jnp.sum(y) + jnp.sum(y**2) - jnp.mean(jnp.cos(y)))


def product(w: Any, x: Any) -> Any:
    y = jnp.sin(x @ w)
    return jnp.sum(y) * jnp.sum(y**2)


def root(w: Any, x: Any) -> Any:
    y = jnp.sin(x @ w)
    return jnp.sqrt(jnp.sum(y**2)) + jnp.sum(y)


def shifted(w: Any, x: Any) -> Any:
    y = jnp.sin(x @ w)
    return (jnp.sum(y) + 1) + (jnp.sum(y**2) + 2)


def scaled_by_a_sum(w: Any, x: Any) -> Any:
    y = jnp.sin(x @ w)
    total = jnp.sum(y)
    return jnp.sum(y**2) * jnp.abs(total) + total


def with_auxiliary(w: Any, x: Any) -> Any:
    y = jnp.sin(x @ w)
    first, second = jnp.sum(y), jnp.sum(y**2)
    return first + second, first


def narrow(w: Any, x: Any) -> Any:
    y = jnp.sin(x @ w).astype("bfloat16")
    return jnp.sum(y, dtype="bfloat16") + jnp.sum(y * y, dtype="bfloat16")


ARGS = normal(ROWS, ROWS) / 8, normal(WIDTH * 4, ROWS, seed=1)
JOINED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "vae": (vae, ARGS),
    "small code": (small_code, ARGS),
    "three": (three, ARGS),
    "scaled by an input": (scaled_by_an_input, (*ARGS, jnp.float32(0.3))),
}
APART = {"product": product, "root": root, "shifted": shifted, "scaled by a sum": scaled_by_a_sum,
         "auxiliary": with_auxiliary, "narrow": narrow}  # fmt: skip


def regions(f: Callable[..., Any], *args: Any) -> list[Region]:
    prog = trace(lambda *xs: jax.tree.leaves(f(*xs)), *args)
    return [choice.regions[-1] for choice in choices(opened(prog))]


@pytest.mark.parametrize("name", JOINED)
def test_linearly_combined_sums_leave_a_region_as_one_scalar_loss(name: str) -> None:
    f, args = JOINED[name]
    losses = [r for r in regions(f, *args) if loss_position(r) is not None]
    assert losses
    assert all(len(region.outputs) == 1 for region in losses)


@pytest.mark.parametrize("name", JOINED)
def test_values_and_gradients_are_those_of_the_program(name: str) -> None:
    f, args = JOINED[name]
    prog = trace(lambda *xs: [f(*xs)], *args)
    for region in regions(f, *args):
        sliced = in_slices(prog, (decision_for(region),))
        g = lambda *xs, prog=sliced: evaluate(prog, [*xs])[0]
        for of in (lambda h: h, lambda h: xform.grad(h, (0, 1)), lambda h: jax.grad(h, (0, 1))):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4),
                         of(g)(*args), of(f)(*args))  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_other_functions_of_sums_stay_outside(name: str) -> None:
    for region in regions(APART[name], *ARGS):
        summed = {eqn.primitive.name for eqn, slicing in region.equations if slicing.summed}
        assert summed <= {"reduce_sum", "dot_general"}


def test_a_value_that_waits_for_an_effect_is_not_read(capfd: Any) -> None:
    """The loop comes before the print, and the factor after it."""

    def f(w: Any, x: Any, beta: Any) -> Any:
        y = jnp.sin(x @ w)
        first = jnp.sum(y)
        jax.debug.print("first {}", first)
        beta = jax.pure_callback(lambda b: b, jax.ShapeDtypeStruct((), "float32"), beta)
        return first + beta * jnp.sum(y**2)

    args = (*ARGS, jnp.float32(0.3))
    prog = trace(lambda *xs: [f(*xs)], *args)
    for region in regions(f, *args):
        got = evaluate(in_slices(prog, (decision_for(region),)), [*args])[0]
        np.testing.assert_allclose(got, f(*args), rtol=1e-4)


def test_a_value_that_the_caller_reads_leaves_the_region_as_before() -> None:
    """Growing forward from the code makes no loss of the region, so it does not grow."""

    def f(w: Any, x: Any) -> Any:
        mean = x @ w[:, :4]
        made = jnp.exp(jnp.tanh(mean @ w[:, 8:12].T))
        return jnp.mean(jnp.sum((made - x) ** 2, -1)), jnp.cumsum(jnp.sin(mean), 0)

    starts = {r.start.aval.shape: r for r in regions(f, *ARGS)}  # pyright: ignore
    region = starts[WIDTH * 4, ROWS]
    assert {y.aval.shape for y, _, axis in region.outputs if axis is not None} == {(WIDTH * 4, 4)}
    assert "sin" not in {eqn.primitive.name for eqn, _ in region.equations}


@pytest.mark.parametrize("loss", [vae, small_code])
def test_a_vae_in_slices_recomputes_nothing(loss: Any) -> None:
    w, x = normal(256, 256) / 16, normal(4096, 256, seed=1)
    figures: Any = jax.jit(jax.grad(loss)).lower(w, x).compile().memory_analysis()
    size = 2 * w.nbytes + x.nbytes + figures.temp_size_in_bytes // 3
    plan = xform.plan(loss, w, x, policy=f"slices:budget:{size}")
    assert plan.recompute_flops == 0
    assert "value and gradient in one loop" in plan.sliced_regions[0]
