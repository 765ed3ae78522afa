"""`xform.plan` of a loss: `grad` does what it decides, on the target, within the budget."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform
from tests.reference import close
from xform import errors, policies
from xform.memory import compilation

W = np.cos(np.arange(6 * 64 * 64.0)).reshape(6, 64, 64).astype(np.float32) / 8
X = np.sin(np.arange(64 * 64.0)).reshape(64, 64).astype(np.float32)


def scanned(w, x):
    return jnp.sum(lax.scan(lambda x, w: (jnp.sin(jnp.tanh(x @ w) @ w), None), x, w)[0])


def unrolled(w, x):
    for i in range(6):
        x = checkpoint_name(jnp.sin(jnp.tanh(x @ w[i]) @ w[i]), f"layer {i}")
    return jnp.sum(x)


def residual_bytes(f, policy) -> int:
    return xform.residuals(f, W, X, argnums=0, policy=policy).total_bytes


@pytest.mark.parametrize("f", [scanned, unrolled])
@pytest.mark.parametrize(
    "policy",
    [None, policies.save_nothing, policies.save_dots, policies.budget("110 KiB", of="saved")],
)
def test_grad_does_as_the_plan_says(f, policy) -> None:
    made = xform.plan(f, W, X, policy=policy, verify=False)
    kept = policies.min_cut if policy is None else policy
    assert made.saved_bytes == residual_bytes(f, kept) == residual_bytes(f, made)
    for platform in ("cpu", "tpu"):
        by_policy, by_plan = (
            jax.jit(xform.grad(f, policy=by)).trace(W, X).lower(lowering_platforms=(platform,))
            for by in (kept, made)
        )
        assert by_plan.as_text() == by_policy.as_text()
    close(jax.jit(xform.grad(f, policy=made))(W, X), jax.grad(f)(W, X), 1e-4)


def test_a_plan_needs_no_compiled_function() -> None:
    made = xform.plan(unrolled, W, X, policy=policies.budget("60 KiB", of="saved"), verify=False)
    close(xform.grad(unrolled, policy=made)(W, X), jax.grad(unrolled)(W, X), 1e-4)


def test_vjp_of_all_arguments_and_outputs_that_are_no_scalars() -> None:
    f = lambda w, x: jnp.sin(jnp.sin(x @ w[0]) @ w[1])
    made = xform.plan(f, W, X, argnums=None)
    assert made.compiled_bytes is not None
    y, pull = xform.vjp(f, W, X, policy=made)
    close(pull(y), jax.vjp(f, W, X)[1](y), 1e-4)


def test_auxiliary_outputs_and_other_positions() -> None:
    f = lambda n, w, x: (jnp.sum(jnp.sin(x @ w[n])), {"n": x})
    made = xform.plan(f, 2, W, X, argnums=(1, 2), has_aux=True)
    g, aux = jax.jit(
        lambda w, x: xform.grad(f, (1, 2), has_aux=True, policy=made)(2, w, x)
    )(W, X)  # fmt: skip
    close(g, jax.grad(f, (1, 2), has_aux=True)(2, W, X)[0], 1e-4)
    assert set(aux) == {"n"}


@pytest.mark.parametrize("part", [0.9, 0.6])
@pytest.mark.parametrize("f", [scanned, unrolled])
def test_a_budget_of_the_peak_is_kept_by_the_compiler(f, part: float) -> None:
    most, least = (
        xform.plan(f, W, X, policy=p).compiled_bytes
        for p in (
            policies.min_cut,
            policies.budget(int(residual_bytes(f, policies.MinCut(0, 0))), of="saved"),
        )
    )
    assert most is not None
    assert least is not None
    budget = int(least + part * max(0, most - least))
    made = xform.plan(f, W, X, policy=policies.budget(budget))
    assert made.compiled_bytes is not None
    assert made.compiled_bytes <= budget
    assert made.compiles <= 7  # the default and six more
    step = jax.jit(xform.grad(f, policy=made)).lower(W, X).compile()
    stats = step.memory_analysis()
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert total == made.compiled_bytes


def test_donated_arguments_are_counted_once() -> None:
    usual = xform.plan(unrolled, W, X)
    donated = xform.plan(unrolled, W, X, donate_argnums=0)
    assert usual.predicted_bytes - donated.predicted_bytes == W.nbytes
    assert usual.compiled_bytes is not None
    assert donated.compiled_bytes is not None
    spared = usual.compiled_bytes - donated.compiled_bytes
    assert 0.8 * W.nbytes <= spared <= W.nbytes


def test_a_peak_below_the_floor_is_refused() -> None:
    with pytest.raises(errors.BudgetInfeasible) as caught:
        xform.plan(scanned, W, X, policy=policies.budget("1 KiB"))
    assert caught.value.floor_bytes > W.nbytes + X.nbytes
    for part in ("policy=budget('1 KiB')", "arguments", "outputs", "donate"):
        assert part in str(caught.value)
    # The floor in the message is feasible.
    floor = policies.budget(caught.value.floor_bytes)
    assert xform.plan(scanned, W, X, policy=floor).compiled_bytes <= caught.value.floor_bytes


def test_a_peak_is_bounded_where_a_function_is_traced() -> None:
    """This is without `xform.plan`, by simulation."""
    free = xform.plan(unrolled, W, X, verify=False)
    budget = policies.budget(int(0.9 * free.predicted_bytes))
    kept = xform.residuals(unrolled, W, X, argnums=0, policy=budget)
    assert kept.total_bytes < free.saved_bytes
    close(jax.jit(xform.grad(unrolled, policy=budget))(W, X), jax.grad(unrolled)(W, X), 1e-4)


def test_saved_plans_of_two_runs_are_identical(tmp_path) -> None:
    texts = []
    for name in ("a", "b"):
        jax.clear_caches()
        made = xform.plan(
            unrolled, W, X, policy=policies.budget("70 KiB", of="saved"), verify=False
        )
        made.save(tmp_path / name)
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]


def test_another_function_is_refused() -> None:
    made = xform.plan(unrolled, W, X, verify=False)
    with pytest.raises(errors.OtherProgram) as caught:
        jax.jit(xform.grad(scanned, policy=made))(W, X)
    assert "test_loss_plan.py" in str(caught.value)
    assert "made for another program" in str(caught.value)
    with pytest.raises(errors.OtherProgram):
        jax.jit(xform.grad(unrolled, 1, policy=made))(W, X)


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(errors.WrongArgument) as caught:
        xform.plan(scanned, W, X, target="abacus")
    assert "give one of cpu" in str(caught.value)


def test_a_target_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is simulated and compiled for the target; here a substitute replaces its compiler."""
    asked = []

    def compile_for(f, args, *, target, donate_argnums):
        asked.append(target.name)
        return dataclasses.replace(said, bytes={"temp": 10**6 * len(asked)})

    said = compilation.compile_for(jnp.sin, (X,))
    monkeypatch.setattr("xform.memory.compilation.compile_for", compile_for)
    made = xform.plan(unrolled, W, X, target="tpu:v5e:1x1")
    assert (made.target, made.compiled_bytes, asked) == ("tpu:v5e:1x1", 10**6, ["tpu:v5e:1x1"])
    here, other = (
        xform.plan(unrolled, W, X, target=t, verify=False).predicted_bytes
        for t in ("cpu", "tpu:v5e:1x1")
    )
    assert made.predicted_bytes == other
    assert here != other


def test_only_the_derivative_is_compiled_and_the_report_names_it() -> None:
    """A budget of the bytes that `grad` takes is enough, and these are the plan's bytes."""
    f = lambda w, x: (jnp.tanh(x @ w) ** 2).sum()
    w, x = jnp.ones((64, 64)), jnp.ones((32, 64))

    def taken(g):
        said = jax.jit(g).lower(w, x).compile().memory_analysis()
        return (said.argument_size_in_bytes + said.output_size_in_bytes + said.temp_size_in_bytes
                - said.alias_size_in_bytes)  # fmt: skip

    aux = lambda w, x: (f(w, x), x[0])
    several = lambda w, x: jnp.tanh(x @ w)
    pulled = lambda ct: lambda w, x: (lambda y, pull: (y, pull(ct)))(*xform.vjp(f, w, x))
    cases = {
        "grad by argument 0": (f, {}, xform.grad(f)),
        "grad by argument 1": (f, {"argnums": -1}, xform.grad(f, 1)),
        "grad by arguments 0, 1": (f, {"argnums": (0, 1)}, xform.grad(f, (0, 1))),
        "vjp by arguments 0, 1": (f, {"argnums": None}, pulled(1.0)),
    }
    for name, (g, options, derivative) in cases.items():
        cotangent = 4 if name.startswith("vjp") else 0  # for the plan it is an argument
        budget = taken(derivative) + cotangent
        made = xform.plan(g, w, x, policy=xform.policies.budget(budget), **options)
        assert made.derivative == name
        assert f"compiled as {name} (" in str(made)
        assert made.compiled_bytes <= budget
    assert xform.plan(aux, w, x, has_aux=True).compiled_bytes == taken(
        xform.grad(aux, has_aux=True)
    )
    assert xform.plan(f, w, x).compiled_bytes == taken(xform.grad(f))
    assert xform.plan(several, w, x).derivative == "vjp by argument 0"


def test_a_plan_sees_through_a_jitted_model_and_applies_outside_jit_too() -> None:
    """A function that is called once is planned with its caller, also where nothing is compiled."""

    def layers(ws, x):
        for w in ws:
            x = x + jnp.tanh(jax.nn.softmax(x @ w) @ w)
        return x

    loss = lambda model: lambda ws, x: jnp.sum(model(ws, x) ** 2)
    args = jnp.ones((8, 16, 16)) / 16, jnp.ones((32, 16))
    jitted, plain = loss(jax.jit(layers)), loss(layers)
    plan = xform.plan(jitted, *args, policy=xform.policies.min_cut)
    assert len(plan) == len(xform.plan(plain, *args, policy=xform.policies.min_cut))
    for way in (lambda f: f, jax.jit):
        close(way(xform.grad(jitted, policy=plan))(*args), jax.grad(plain)(*args), 1e-5)


def test_the_function_runs_once_however_many_plans_are_compiled() -> None:
    calls: list[int] = []

    def loss(w, x):
        calls.append(0)
        return unrolled(w, x)

    default = xform.plan(loss, W, X)
    calls.clear()
    made = xform.plan(loss, W, X, policy=policies.budget(int(0.9 * default.compiled_bytes)))
    assert made.compiles > 1
    assert len(calls) == 1
