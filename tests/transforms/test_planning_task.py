"""Planning a whole step: the derivative inside it, for the bytes of the step."""

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
from xform.memory.targets import parse_target
from xform.transforms.planning_task import planning_task, with_policy

W = np.cos(np.arange(8 * 64 * 64.0)).reshape(8, 64, 64).astype(np.float32) / 40
X = np.sin(np.arange(256 * 64.0)).reshape(256, 64).astype(np.float32)
ADAM = optax.adam(1e-3)
STEP: Any = {"policy_argument": "policy"}


def layer(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) @ w) @ w.T, None


def loss(w, x):
    return jnp.mean(lax.scan(layer, x, w)[0] ** 2)


def updated(w, state, g):
    updates, state = ADAM.update(g, state, w)
    return optax.apply_updates(w, updates), state


def step(w, state, x, *, policy=None):
    value, g = xform.value_and_grad(loss, policy=policy)(w, x)
    return *updated(w, state, g), value


def accumulated(w, state, x, policy=None):
    def add(total, x):
        return total + xform.grad(loss, policy=policy)(w, x), None

    return updated(w, state, lax.scan(add, jnp.zeros_like(w), x.reshape(4, -1, 64))[0])


def twice(w, state, x, policy=None):
    gradient = xform.grad(loss, policy=policy)
    return updated(w, state, gradient(w, x) + gradient(w, 2 * x))


def arguments() -> tuple[Any, ...]:
    return W, ADAM.init(W), X


def compiled_bytes(f: Any, plan: xform.Plan, donate: tuple[int, ...]) -> int:
    made = jax.jit(f, static_argnames="policy", donate_argnums=donate)
    sizes = made.lower(*arguments(), policy=plan).compile().memory_analysis()
    total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return total - sizes.alias_size_in_bytes


@pytest.mark.parametrize(
    ("f", "donate"), [(step, ()), (step, (0, 1)), (accumulated, (0, 1)), (twice, (0, 1))]
)
def test_the_bytes_of_a_plan_are_those_of_the_whole_step(f: Any, donate: tuple[int, ...]) -> None:
    default = xform.plan(f, *arguments(), **STEP, donate_argnums=donate)
    assert default.function == f.__name__
    assert default.compiled_bytes == compiled_bytes(f, default, donate)
    assert f is not step or abs(default.predicted_bytes / default.compiled_bytes - 1) < 0.05
    budget = policies.budget(int(0.8 * default.compiled_bytes))
    plan = xform.plan(f, *arguments(), **STEP, policy=budget, donate_argnums=donate)
    assert plan.compiled_bytes == compiled_bytes(f, plan, donate) <= budget.bytes
    assert plan.recompute_flops > 0
    new = jax.jit(lambda *args: f(*args, policy=plan))(*arguments())
    close(new, jax.jit(f)(*arguments()), 1e-4)


def test_a_function_that_was_jitted_keeps_its_options() -> None:
    donated = jax.jit(step, static_argnames="policy", donate_argnums=(0, 1))
    by_jit = xform.plan(donated, *arguments(), **STEP)
    by_plan = xform.plan(step, *arguments(), **STEP, donate_argnums=(0, 1))
    assert by_jit.compiled_bytes == by_plan.compiled_bytes
    assert by_jit.predicted_bytes == by_plan.predicted_bytes
    assert xform.plan(step, *arguments(), **STEP).compiled_bytes > by_jit.compiled_bytes


def test_plan_of_a_step_without_verify_compiles_nothing() -> None:
    default = xform.plan(step, *arguments(), **STEP, verify=False)
    assert default.compiled_bytes is None
    budget = policies.budget(int(0.8 * default.predicted_bytes))
    assert (
        xform.plan(step, *arguments(), **STEP, policy=budget, verify=False).predicted_bytes
        <= budget.bytes
    )


def test_below_its_floor_a_step_names_the_floor() -> None:
    donate = (0, 1)
    with pytest.raises(errors.BudgetInfeasible) as caught:
        xform.plan(step, *arguments(), **STEP, policy=policies.budget(1), donate_argnums=donate)
    assert "256.0 KiB outside the derivative" in str(caught.value)
    floor = policies.budget(caught.value.floor_bytes)
    plan = xform.plan(step, *arguments(), **STEP, policy=floor, donate_argnums=donate)
    assert plan.compiled_bytes <= floor.bytes


def test_derivatives_with_their_own_policy_are_left_out_of_the_plan() -> None:
    def penalized(w, state, x, policy=None):
        other = xform.grad(lambda w: jnp.sum(jnp.sin(w)), policy=policies.save_nothing)(w)
        return updated(w, state, other + xform.grad(loss, policy=policy)(w, x))

    plan = xform.plan(penalized, *arguments(), **STEP, policy=policies.save_dots)
    assert [row.operation for row in plan] == [
        row.operation for row in xform.plan(loss, W, X, policy=policies.save_dots)
    ]


def test_regions_are_opened_in_a_step_too() -> None:
    def marked(w, x):
        return jnp.mean(lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)

    def of_marked(w, x, policy=None):
        return w - xform.grad(marked, policy=policy)(w, x)

    plans = [
        xform.plan(of_marked, W, X, **STEP, policy=policy)
        for policy in (policies.min_cut, policies.open_regions())
    ]
    assert plans[0].recompute_flops > plans[1].recompute_flops == 0
    new = jax.jit(lambda w, x: of_marked(w, x, policy=plans[1]))(W, X)
    close(new, W - jax.grad(marked)(W, X), 1e-4)


def two(w, v, x, policy=None):
    """A player and its opponent."""
    player = xform.grad(loss, policy=policy)(w, x)
    return w - player, v - xform.grad(lambda v, x: jnp.sum(jnp.sin(x @ v) @ v.T), policy=policy)(
        v, x
    )


@pytest.mark.parametrize(
    ("f", "args", "problem"),
    [
        (lambda w, x, policy=None: w - jax.grad(loss)(w, x), (W, X), "differentiates nothing"),
        (two, (W, W[0], X), "differentiates 2 different functions"),
    ],
)
def test_a_step_has_one_derivative(f: Any, args: Any, problem: str) -> None:
    with pytest.raises(errors.NotOneDerivative, match=problem) as caught:
        xform.plan(f, *args, **STEP)
    assert "test_planning_task.py" in str(caught.value)


def test_a_budget_of_several_derivatives_is_compared_all_the_same() -> None:
    args = W, W[0], X
    (default,) = xform.compare(two, *args, **STEP, policies=[None])
    budget = policies.budget(int(0.9 * default.report.total_bytes))
    (kept,) = xform.compare(two, *args, **STEP, policies=[budget])
    assert kept.report.total_bytes <= budget.bytes


@pytest.mark.parametrize("options", [{"argnums": 1}, {"argnums": None}, {"has_aux": True}])
def test_argnums_or_has_aux_with_policy_argument_raises(options: dict[str, Any]) -> None:
    with pytest.raises(errors.WrongArgument, match=r"policy_argument='policy', (.|\n)*drop one"):
        xform.plan(step, *arguments(), **STEP, **options)


def renamed(w, state, x, memory=None):
    """A step whose parameter for the policy has another name."""
    return step(w, state, x, policy=memory)


def test_the_parameter_may_have_any_name() -> None:
    plan = xform.plan(step, *arguments(), **STEP, verify=False)
    for f in (renamed, lambda *args, **kwargs: renamed(*args, **kwargs)):
        other = xform.plan(f, *arguments(), policy_argument="memory", verify=False)
        assert other.rows == plan.rows
    (one,) = xform.compare(renamed, *arguments(), policy_argument="memory", policies=["min_cut"])
    (other,) = xform.compare(step, *arguments(), **STEP, policies=["min_cut"])
    assert one.report.total_bytes == other.report.total_bytes


def test_a_loss_may_have_a_parameter_called_policy() -> None:
    scaled = lambda w, x, policy=2.0: policy * loss(w, x)
    assert xform.plan(scaled, W, X, verify=False).derivative == "grad by argument 0"


@pytest.mark.parametrize("ask", [
    lambda f, *args, **how: xform.plan(f, *args, **how),
    lambda f, *args, **how: xform.compare(f, *args, policies=["min_cut"], **how),
    lambda f, *args, **how: xform.pareto(f, *args, points=1, verify=False, **how),
])  # fmt: skip
@pytest.mark.parametrize(("name", "problem"), [
    ("polcy", "step has no parameter 'polcy'; its signature is step\\(w, state, x, \\*, "
     "policy=None\\)"),
    ("x", "the parameter 'x' of step is given by position already"),
    (3, "step has no parameter 3"),
])  # fmt: skip
def test_a_policy_argument_that_is_none(ask: Any, name: Any, problem: str) -> None:
    with pytest.raises(errors.WrongArgument, match=problem) as caught:
        ask(step, *arguments(), policy_argument=name)
    assert "test_planning_task.py" in caught.value.where


@pytest.mark.parametrize("ask", [
    lambda f, *args: xform.plan(f, *args),
    lambda f, *args: xform.compare(f, *args, policies=["min_cut"]),
    lambda f, *args: xform.pareto(f, *args),
])  # fmt: skip
@pytest.mark.parametrize("f", [step, jax.jit(step, static_argnames="policy"), xform.grad(loss),
                               jax.grad(loss)])  # fmt: skip
def test_a_step_or_a_gradient_is_no_loss(ask: Any, f: Any) -> None:
    args = (W, X) if "grad" in repr(f) or f.__name__ == "loss" else arguments()
    with pytest.raises(errors.NotScalar) as caught:
        ask(f, *args)
    assert "remedy:  pass the loss" in str(caught.value)
    assert 'policy_argument="policy"' in str(caught.value)


def test_all_outputs_of_a_gradient_are_differentiated_if_asked() -> None:
    assert xform.plan(xform.grad(loss), W, X, argnums=None, verify=False).saved_bytes > 0


def test_outside_bytes_count_optimizer_moments_unless_donated() -> None:
    """Adam's two moments are live all the time; if they are donated, the new ones cost nothing."""
    target = parse_target(None)
    donated = planning_task(step, arguments(), 0, False, "policy", target, (0, 1), "marked")
    free = planning_task(step, arguments(), 0, False, "policy", target, (), "marked")
    moments = 2 * W.nbytes
    assert moments <= donated.outside_argument_bytes <= moments + 64
    assert moments - 64 <= donated.problem.outside_bytes <= 1.2 * moments
    assert free.problem.outside_bytes > donated.problem.outside_bytes
    of_loss = planning_task(loss, (W, X), 0, False, None, target, (0,), "marked")
    assert of_loss.problem.outside_bytes == of_loss.outside_argument_bytes == -W.nbytes


def test_with_policy_differentiates_a_loss_and_keeps_a_step() -> None:
    run, options = with_policy(loss, policies.save_nothing, 0, None)
    assert run.__name__ == "loss"
    assert options == {}
    value, g = run(W, X)
    close(g, jax.grad(loss)(W, X), 1e-4)
    assert value.shape == ()
    run, options = with_policy(step, None, 0, "policy")
    assert (run.__name__, options) == ("step", {})
    made = jax.jit(step, static_argnames="policy")
    assert with_policy(made, None, 0, "policy") == (made, {"policy": None})
