"""A budget with slices: regions run in slices if no other plan fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform.errors import BudgetInfeasible, OtherProgram, WrongArgument
from xform.policies import as_code, budget, parse, policy_name

MIB = 2**20
ROWS, WIDTH, WORDS = 512, 32, 2048


def loss(p: Any, h: Any, y: Any) -> Any:
    logits = jnp.tanh(h @ p["v"]) @ p["w"]
    picked = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def data() -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / 4, "float32")
    p = {"v": normal(WIDTH, WIDTH), "w": normal(WIDTH, WORDS)}
    return p, normal(ROWS, WIDTH), jnp.asarray(random.integers(0, WORDS, ROWS), "int32")


def total(f: Callable[..., Any], *args: Any) -> int:
    figures: Any = jax.jit(f).lower(*args).compile().memory_analysis()
    ends = figures.argument_size_in_bytes + figures.output_size_in_bytes
    return ends + figures.temp_size_in_bytes - figures.alias_size_in_bytes


def close(a: Any, b: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-7), a, b)


@pytest.fixture(scope="module")
def plan() -> xform.Plan:
    return xform.plan(loss, *data(), policy="slices:budget:2MiB")


def test_a_plan_names_its_slices(plan: xform.Plan) -> None:
    assert total(xform.grad(loss), *data()) > 4 * MIB
    assert plan.compiled_bytes is not None
    assert plan.compiled_bytes <= 2 * MIB
    assert plan.recompute_flops == 0
    (text,) = plan.sliced_regions
    assert text.partition(" ")[0] == str(plan.slices[0].n)
    assert f"f32[{ROWS},{WORDS}] (dot_general at {__file__}" in text
    assert "value and gradient in one loop" in text
    assert text in str(plan)
    assert f"{plan.slices[0].n} slices of axis 0" in plan.summary


def test_few_slices_are_enough(plan: xform.Plan) -> None:
    """Larger budgets need fewer slices."""
    larger = xform.plan(loss, *data(), policy="slices:budget:3MiB")
    assert 1 < larger.slices[0].n < plan.slices[0].n < 64


def test_a_plan_with_slices_is_a_policy_and_a_file(plan: xform.Plan, tmp_path: Path) -> None:
    args = data()
    plan.save(tmp_path / "plan.json")
    for policy in (plan, xform.Plan.load(tmp_path / "plan.json")):
        g = xform.grad(loss, policy=policy)
        assert total(g, *args) == plan.compiled_bytes
        close(jax.jit(g)(*args), jax.grad(loss)(*args))
    with pytest.raises(OtherProgram):
        jax.jit(xform.grad(lambda p, h, y: loss(p, h[:8], y[:8]), policy=plan))(*args)


def test_under_jit_the_compiler_decides() -> None:
    args = data()
    g = xform.value_and_grad(loss, policy="slices:budget:2MiB")
    assert total(g, *args) <= 2 * MIB
    close(jax.jit(g)(*args), jax.value_and_grad(loss)(*args))


def test_a_step_within_a_budget() -> None:
    args = data()

    def step(p: Any, h: Any, y: Any) -> Any:
        value, g = xform.value_and_grad(loss)(p, h, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, g), value

    small = xform.jit(step, "slices:budget:2MiB")
    close(small(*args), jax.jit(step)(*args))
    chosen = small.plan
    assert chosen.compiled_bytes <= 2 * MIB
    (of_derivative,) = chosen.plans.values()
    assert of_derivative.sliced_regions


def test_simulated_plans_have_slices_too() -> None:
    chosen = xform.plan(loss, *data(), policy=budget("2MiB", slices=True), verify=False)
    assert chosen.sliced_regions
    assert total(xform.grad(loss, policy=chosen), *data()) <= 1.05 * 2 * MIB


def test_a_program_that_fits_has_no_slices() -> None:
    chosen = xform.plan(loss, *data(), policy="slices:budget:64MiB")
    assert not chosen.slices
    assert chosen.compiles <= 1  # the default plan, if no other test has compiled it


def test_slices_together_with_other_decisions() -> None:
    """Layers in a scan are recomputed or in slices, the logits in slices."""

    def deep(p: Any, h: Any, y: Any) -> Any:
        h = lax.scan(lambda h, v: (jnp.tanh(h @ v), None), h, p["layers"])[0]
        return loss(p, h, y)

    p, h, y = data()
    p = {**p, "layers": jnp.stack([p["v"]] * 16)}
    chosen = xform.plan(deep, p, h, y, policy="slices:budget:1.5MiB")
    assert chosen.slices
    g = jax.jit(xform.grad(deep, policy=chosen))
    assert total(g, p, h, y) <= 1.5 * MIB
    close(g(p, h, y), jax.grad(deep)(p, h, y))


def test_the_refusal_names_a_floor_that_is_kept() -> None:
    args = data()
    with pytest.raises(BudgetInfeasible, match="slices of axis") as caught:
        xform.plan(loss, *args, policy="slices:budget:600KiB")
    floor = caught.value.floor_bytes
    assert floor < MIB
    assert xform.plan(loss, *args, policy=budget(floor, slices=True)).compiled_bytes <= floor  # pyright: ignore[reportOptionalOperand]


def test_a_refusal_without_slices_names_them() -> None:
    with pytest.raises(BudgetInfeasible) as caught:
        xform.plan(loss, *data(), policy="budget:2MiB")
    found = re.search(
        r"slices=True \(slices:budget:... as text\): that takes ([\d.]+) KiB \(compiled\)",
        str(caught.value),
    )
    assert found is not None
    least = int((float(found[1]) + 0.1) * 1024)
    reached = xform.plan(loss, *data(), policy=budget(least, slices=True)).compiled_bytes
    assert reached is not None
    assert reached <= least
    with pytest.raises(BudgetInfeasible, match=r"as text\): that takes .* \(simulated\)"):
        xform.plan(loss, *data(), policy="budget:2MiB", verify=False)
    with pytest.raises(BudgetInfeasible) as caught:
        xform.plan(lambda x: jnp.sort(x)[0], jnp.ones(4096), policy="budget:20KiB")
    assert "slices=True" not in str(caught.value)


NOTHING: dict[str, tuple[Callable[..., Any], Any]] = {
    "softmax over the axis": (lambda x: jax.nn.softmax(x, 0)[0].sum(), (256, 1)),
    "batch norm": (lambda x: jnp.sum(((x - x.mean()) / x.std()) ** 3), (4096,)),
    "sort": (lambda x: jnp.sort(x)[0], (4096,)),
    "cumsum": (lambda x: jnp.cumsum(jnp.sin(x))[-1], (4096,)),
    "maximum": (lambda x: jnp.max(jnp.cumsum(x)), (4096,)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_tight_budget_for_an_unsliceable_function_raises(name: str) -> None:
    f, sizes = NOTHING[name]
    x = jnp.linspace(0.1, 1, int(np.prod(sizes))).reshape(sizes)
    with pytest.raises(BudgetInfeasible):
        xform.plan(f, x, policy=budget(2 * x.nbytes - 1, slices=True))


def test_texts() -> None:
    policy = parse("slices:budget:6GiB")
    assert policy == budget("6GiB", slices=True)
    assert policy_name(policy) == "slices:budget:6GiB"
    assert as_code(policy) == "xform.policies.budget('6GiB', slices=True)"
    both = parse("open:slices:budget:6GiB")
    assert parse("slices:open:budget:6GiB") == both
    assert parse(policy_name(both)) == both
    for text in ("slices:min_cut", "slices:saved:6GiB", "slices:auto"):
        with pytest.raises(WrongArgument, match="slices"):
            parse(text)
    with pytest.raises(WrongArgument, match="slices=True"):
        budget("1 MiB", of="saved", slices=True)
