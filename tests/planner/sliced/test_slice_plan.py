"""The slices of a loss save less for their own backward passes if the budget is smaller."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform
from xform._jax import jaxprs_of
from xform.errors import BudgetInfeasible
from xform.planner.sliced.loss import loss_position
from xform.planner.sliced.slice_plan import fewer_saved_bytes, plan_of_slice, slice_program
from xform.program.arithmetic import differentiable
from xform.program.ir import trace
from xform.slices.candidates import choices
from xform.slices.opened import opened

LAYERS, BATCH, LENGTH, WIDTH = 6, 4, 64, 16


def block(h: Any, w: Any) -> Any:
    mixed = jax.nn.softmax(h @ h.swapaxes(1, 2), -1) @ h  # so only the batch can be sliced
    return h + jax.nn.gelu(mixed @ w["up"]) @ w["down"], None


def loss(ws: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(block, x, ws)[0] ** 2)


def data() -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / 4, "float32")
    ws = {"up": normal(LAYERS, WIDTH, 4 * WIDTH), "down": normal(LAYERS, 4 * WIDTH, WIDTH)}
    return ws, normal(BATCH, LENGTH, WIDTH)


def product_flops(jaxpr: Any) -> int:
    """Return the FLOPs of the matrix products of a program, with the trips of its loops."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        trips = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner in jaxprs_of(eqn):
            total += trips * product_flops(inner)
    return total


@pytest.fixture(scope="module")
def plans() -> tuple[xform.Plan, xform.Plan]:
    """A plan whose slices save what a minimum cut saves, and one within half of its bytes."""
    roomy = xform.plan(loss, *data(), policy="slices:budget:800KiB")
    assert roomy.compiled_bytes is not None
    (slices,) = roomy.slices
    assert (slices.n, slices.saved_bytes) == (BATCH, None)
    tight = xform.policies.budget(int(0.7 * roomy.compiled_bytes), slices=True)
    return roomy, xform.plan(loss, *data(), policy=tight)


def test_a_smaller_budget_lets_each_slice_save_less(plans: Any) -> None:
    roomy, tight = plans
    assert tight.compiled_bytes <= 0.7 * roomy.compiled_bytes
    (slices,) = tight.slices
    assert slices[:4] == roomy.slices[0][:4]
    assert slices.saved_bytes is not None
    assert f"each slice saves at most {slices.saved_bytes / 1024:.1f} KiB" in str(tight)


def test_a_slice_saves_as_much_as_fits(plans: Any) -> None:
    roomy, tight = plans
    policy = xform.policies.budget(int(0.9 * roomy.compiled_bytes), slices=True)
    between = xform.plan(loss, *data(), policy=policy)
    assert tight.compiled_bytes < between.compiled_bytes <= 0.9 * roomy.compiled_bytes
    assert 0 < between.recompute_flops <= tight.recompute_flops / 2


def test_the_recomputed_work_is_that_of_the_program(plans: Any) -> None:
    roomy, tight = plans
    more, fewer = (
        product_flops(jax.make_jaxpr(xform.grad(loss, policy=plan))(*data()).jaxpr)
        for plan in (tight, roomy)
    )
    assert roomy.recompute_flops == 0
    assert tight.recompute_flops == more - fewer > 0


def test_the_gradient_is_that_of_jax(plans: Any, tmp_path: Path) -> None:
    wanted = jax.jit(jax.grad(loss))(*data())
    plans[1].save(tmp_path / "plan.json")
    again = xform.Plan.load(tmp_path / "plan.json")
    assert again.slices == plans[1].slices
    for plan in (plans[1], again):
        got = jax.jit(xform.grad(loss, policy=plan))(*data())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 1e-7), got, wanted)


def test_the_bytes_that_a_slice_may_save_fall_to_the_fewest() -> None:
    ws, x = data()
    by_leaf = lambda up, down, x: loss({"up": up, "down": down}, x)
    prog = trace(by_leaf, ws["up"], ws["down"], x)
    found = [(r, i) for c in choices(opened(prog)) for r in c.regions[-1:]
             if r.n == BATCH and (i := loss_position(r)) is not None]  # fmt: skip
    region, position = found[0]
    numbers = fewer_saved_bytes(region, position)
    assert len(numbers) > 2
    assert numbers == sorted(set(numbers), reverse=True)
    sliced = slice_program(region)
    active = (False, *map(differentiable, sliced.in_avals[1:]))
    wanted = tuple(i == position for i in range(len(region.outputs)))
    plan_of_slice(sliced, active, wanted, numbers[-1])
    with pytest.raises(BudgetInfeasible):
        plan_of_slice(sliced, active, wanted, numbers[-1] - 1)
