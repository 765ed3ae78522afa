"""`xform.plan` of a training step: the derivatives inside it, for the bytes of the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import xform
from tests.reference import close
from xform import errors, policies
from xform.steps.step_plan import StepPlan

W = np.cos(np.arange(8 * 64 * 64.0)).reshape(8, 64, 64).astype(np.float32) / 40
X = np.sin(np.arange(256 * 64.0)).reshape(256, 64).astype(np.float32)
ADAM = optax.adam(1e-3)
POLICIES: list[Any] = [policies.min_cut, policies.open_regions()]


def layer(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) @ w) @ w.T, None


def loss(w, x):
    return jnp.mean(lax.scan(layer, x, w)[0] ** 2)


def updated(w, state, g):
    updates, state = ADAM.update(g, state, w)
    return optax.apply_updates(w, updates), state


def step(w, state, x):
    value, g = xform.value_and_grad(loss)(w, x)
    return *updated(w, state, g), value


def accumulated(w, state, x):
    def add(total, x):
        return total + xform.grad(loss)(w, x), None

    return updated(w, state, lax.scan(add, jnp.zeros_like(w), x.reshape(4, -1, 64))[0])


def twice(w, state, x):
    gradient = xform.grad(loss)
    return updated(w, state, gradient(w, x) + gradient(w, 2 * x))


def two(w, v, x):
    """A player and its opponent."""
    other = lambda v, x: jnp.sum(jnp.sin(x @ v) @ v.T)
    return w - xform.grad(loss)(w, x), v - xform.grad(other)(v, x)


def arguments() -> tuple[Any, ...]:
    return W, ADAM.init(W), X


def compiled_bytes(f: Any, plan: StepPlan, donate: tuple[int, ...]) -> int:
    """Return JAX's figures of a step that follows a plan."""
    follows = xform.jit(f, plan, donate_argnums=donate)
    sizes = follows.lower(*arguments()).compile().memory_analysis()
    total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return total - sizes.alias_size_in_bytes


@pytest.mark.parametrize(("f", "donate"), [(step, ()), (accumulated, (0, 1)), (twice, (0, 1))])
def test_the_bytes_of_a_plan_are_those_of_the_whole_step(f: Any, donate: tuple[int, ...]) -> None:
    jitted = xform.jit(f, donate_argnums=donate)
    default = xform.plan(jitted, *arguments())
    assert default.function == f.__name__
    assert default.compiled_bytes == compiled_bytes(f, default, donate)
    assert f is not step or abs(default.predicted_bytes / default.compiled_bytes - 1) < 0.05
    budget = policies.budget(int(0.8 * default.compiled_bytes))
    plan = xform.plan(jitted, *arguments(), policy=budget)
    assert plan.compiled_bytes == compiled_bytes(f, plan, donate) <= budget.bytes
    assert plan.recompute_flops > 0
    assert plan.least_flops is not None
    assert plan.least_flops <= plan.recompute_flops
    if f is step:
        follows = xform.jit(f, plan)
        close(follows(*arguments()), jax.jit(f)(*arguments()), 1e-4)


def test_a_plan_is_the_one_of_a_call_and_the_code_of_the_step_runs_once() -> None:
    """It takes two seconds: the step is compiled for a budget."""
    calls: list[int] = []

    def counted(w, x):
        calls.append(0)
        return w - xform.grad(loss)(w, x)

    args = W[:4], X[:64]
    jitted = xform.jit(counted, "budget:340KiB")
    jitted(*args)
    plan = xform.plan(jitted, *args)
    assert plan.compiles == 0
    assert plan.recompute_flops > 0
    assert [p.record for p in plan] == [p.record for p in jitted.plan]
    assert plan.compiled_bytes == jitted.plan.compiled_bytes
    (entry,) = xform.compare(jitted, *args, policies=["budget:340KiB"])
    assert entry.report.total_bytes == plan.compiled_bytes
    assert xform.plan(jitted, *args, policy="budget:330KiB", verify=False).predicted_bytes < 338e3
    assert len(calls) == 1


def test_plan_of_a_step_without_verify_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jitted = xform.jit(step)
    monkeypatch.setattr("xform.steps.program.compile_here", None)
    default = xform.plan(jitted, *arguments(), verify=False)
    assert default.compiled_bytes is None
    budget = policies.budget(int(0.8 * default.predicted_bytes))
    plan = xform.plan(jitted, *arguments(), policy=budget, verify=False)
    assert plan.predicted_bytes <= budget.bytes
    assert plan.policy == default.policy.replace("min_cut", policies.policy_name(budget))


def test_below_its_floor_a_step_names_the_floor() -> None:
    jitted = xform.jit(step, donate_argnums=(0, 1))
    with pytest.raises(errors.BudgetInfeasible) as caught:
        xform.plan(jitted, *arguments(), policy=policies.budget(1))
    assert "256.0 KiB outside the derivative" in str(caught.value)
    floor = policies.budget(caught.value.floor_bytes)
    assert xform.plan(jitted, *arguments(), policy=floor).compiled_bytes <= floor.bytes


def test_derivatives_with_their_own_policy_are_left_out_of_the_plan() -> None:
    def penalized(w, state, x):
        other = xform.grad(lambda w: jnp.sum(jnp.sin(w)), policy=policies.save_nothing)(w)
        return updated(w, state, other + xform.grad(loss)(w, x))

    (plan,) = xform.plan(xform.jit(penalized), *arguments(), policy="save_dots", verify=False)
    of_loss = xform.plan(loss, W, X, policy=policies.save_dots, verify=False)
    assert [row.operation for row in plan] == [row.operation for row in of_loss]


def test_regions_are_opened_in_a_step_too() -> None:
    def marked(w, x):
        return jnp.mean(lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)

    of_marked = xform.jit(lambda w, x: w - xform.grad(marked)(w, x))
    plans = [xform.plan(of_marked, W, X, policy=policy, verify=False) for policy in POLICIES]
    assert plans[0].recompute_flops > plans[1].recompute_flops == 0
    close(of_marked.under(plans[1])(W, X), W - jax.grad(marked)(W, X), 1e-4)


def test_several_derivatives_share_a_budget_and_a_curve() -> None:
    """It takes two seconds: a step of two loops is compiled for a budget."""
    jitted, args = xform.jit(two), (W, W[0], X)
    default = xform.plan(jitted, *args)
    assert len(default) == 2
    budget = policies.budget(int(0.9 * default.compiled_bytes))
    plan = xform.plan(jitted, *args, policy=budget)
    assert plan.compiled_bytes <= budget.bytes
    (kept,) = xform.compare(jitted, *args, policies=[budget])
    assert kept.report.total_bytes == plan.compiled_bytes
    curve = xform.pareto(jitted, *args, points=2, verify=False)
    first, second, *_ = curve
    assert first.peak_bytes == default.predicted_bytes > second.peak_bytes
    assert first.recompute_flops == 0 < second.recompute_flops


def test_a_plan_of_a_step_prints_draws_and_is_a_policy_in_a_file(tmp_path: Any) -> None:
    jitted = xform.jit(two)
    plan = xform.plan(jitted, W, W[0], X, policy="save_nothing", verify=False)
    assert str(plan).count("plan of a derivative in two, save_nothing, on cpu") == 2
    assert "scan.0" in plan.explain("scan.0/carry.0")
    assert plan.saved_bytes == sum(p.saved_bytes for p in plan)
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    plan.save(tmp_path / "plan.json")
    again = xform.plan(jitted, W, W[0], X, policy=f"plan:{tmp_path}/plan.json", verify=False)
    assert [p.record for p in again] == [p.record for p in plan]


@pytest.mark.parametrize("budget", [None, policies.budget("1MiB", symbolic={"b": 256})])
def test_a_step_of_symbolic_dimensions_is_planned_for_one_size(budget: Any) -> None:
    (b,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, 64), np.float32)
    jitted = xform.jit(lambda w, x: w - xform.grad(loss)(w, x))
    plan = xform.plan(jitted, W, x, policy=budget)
    assert plan.compiled_bytes is not None
    assert budget is None or plan.compiled_bytes <= budget.bytes
    sized = jax.ShapeDtypeStruct((256 if budget else 128, 64), np.float32)
    of_size = xform.plan(jitted, W, sized, policy=budget).compiled_bytes
    assert plan.compiled_bytes == pytest.approx(of_size, rel=1e-3)


def test_a_step_without_a_derivative_has_no_plan() -> None:
    by_jax = xform.jit(lambda w, x: w - jax.grad(loss)(w, x))
    with pytest.raises(errors.WrongArgument, match="takes no derivative") as caught:
        xform.plan(by_jax, W, X)
    assert "test_plan.py" in caught.value.where


@pytest.mark.parametrize(
    "options", [{"argnums": 1}, {"argnums": None}, {"has_aux": True}, {"donate_argnums": 0}]
)
def test_options_of_a_loss_are_refused_for_a_step(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(errors.WrongArgument, match=f"with {name}=") as caught:
        xform.plan(xform.jit(step), *arguments(), **options)
    assert "test_plan.py" in caught.value.where


def test_a_loss_may_have_a_parameter_called_policy() -> None:
    scaled = lambda w, x, policy=2.0: policy * loss(w, x)
    assert xform.plan(scaled, W, X, verify=False).derivative == "grad by argument 0"


@pytest.mark.parametrize("ask", [
    lambda f, *args: xform.plan(f, *args),
    lambda f, *args: xform.compare(f, *args, policies=["min_cut"]),
    lambda f, *args: xform.pareto(f, *args),
])  # fmt: skip
@pytest.mark.parametrize("f", [step, jax.jit(step), xform.grad(loss), jax.grad(loss)])
def test_a_step_or_a_gradient_is_no_loss(ask: Any, f: Any) -> None:
    args = (W, X) if "grad" in repr(f) or f.__name__ == "loss" else arguments()
    with pytest.raises(errors.NotScalar) as caught:
        ask(f, *args)
    assert "remedy:  pass the loss" in str(caught.value)
    assert "xform.jit(step)" in str(caught.value)


def test_all_outputs_of_a_gradient_are_differentiated_if_asked() -> None:
    assert xform.plan(xform.grad(loss), W, X, argnums=None, verify=False).saved_bytes > 0


def test_outside_bytes_count_optimizer_moments_unless_donated() -> None:
    """Adam's two moments are live all the time; if they are donated, the new ones cost nothing."""
    moments, outside = 2 * W.nbytes, []
    for donate in ((0, 1), ()):
        lowered = xform.jit(step, donate_argnums=donate).lower(*arguments())
        (problem,) = lowered._planned.problems.values()
        assert moments <= problem.outside_argument_bytes <= moments + 64
        outside.append(problem.outside_bytes)
    assert moments - 64 <= outside[0] <= 1.2 * moments
    assert outside[1] > outside[0]
