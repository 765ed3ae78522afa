"""A recorded computation does the same under all plans, and the user's function runs once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xform
from xform.interpret.deferred import (  # pyright: ignore[reportPrivateUsage]
    Batch,
    _outputs,
    deferred_p,
)
from xform.planner.plan_program import plan_program
from xform.policies import min_cut, save_everything, save_nothing
from xform.transforms.recorded import Chosen, Recorded, recorded

W, XS = jnp.linspace(-1, 1, 16).reshape(4, 4), jnp.linspace(0, 1, 24).reshape(6, 4)


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w) ** 2)


def gradient(w: Any, x: Any) -> Any:
    return xform.grad(loss)(w, x)


def separate(w: Any, xs: Any) -> Any:
    """The forward passes stand in one loop, the backward passes in another."""
    ys, pulls = lax.map(lambda x: xform.vjp(loss, w, x), xs)
    return lax.map(lambda pair: pair[0](pair[1]), (pulls, ys))


def by_labels(w: Any, xs: Any) -> Any:
    return jax.vmap(lambda x: gradient(w, x) - lax.pmean(gradient(w, x), "i"), axis_name="i")(xs)


def _with_jvp(f: Any) -> Any:
    f = jax.custom_jvp(f)
    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return f


def _with_vjp(f: Any) -> Any:
    f = jax.custom_vjp(f)
    f.defvjp(lambda *xs: (f(*xs), None), lambda _, ct: (ct, None))
    return f


STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": gradient,
    "value and grad": lambda w, xs: xform.value_and_grad(loss, (0, 1))(w, xs),
    "vjp": lambda w, xs: (lambda y, pull: pull(2 * y))(*xform.vjp(loss, w, xs)),
    "two seeds": lambda w, xs: (lambda pull: (pull(1.0), pull(2.0)))(xform.vjp(loss, w, xs)[1]),
    "an argument of the loss in the closure": lambda w, xs: xform.grad(lambda w: loss(w, xs))(w),
    "twice": lambda w, xs: gradient(w, xs) + gradient(w, 2 * xs),
    "jit": lambda w, xs: jax.jit(gradient)(w, xs) + jax.jit(gradient)(2 * w, xs),
    "donating jit": lambda w, xs: jax.jit(gradient, donate_argnums=0)(2 * w, xs),
    "scan": lambda w, xs: lax.scan(lambda w, x: (w - gradient(w, x), None), w, xs)[0],
    "while": lambda w, xs: lax.fori_loop(0, 3, lambda i, w: w - gradient(w, xs * i), w),
    "cond": lambda w, xs: lax.cond(jnp.sum(w) < 1, gradient, lambda w, x: w, w, xs),
    "remat": lambda w, xs: jax.checkpoint(gradient)(w, xs),
    "custom_jvp": lambda w, xs: _with_jvp(gradient)(w, xs),
    "custom_vjp": lambda w, xs: _with_vjp(gradient)(w, xs),
    "vmap": lambda w, xs: jax.vmap(gradient, (None, 0))(w, xs),
    "vmap of vmap": lambda w, xs: jax.vmap(jax.vmap(gradient, (None, 0)), (0, None), 1)(
        jnp.stack([w, 2 * w]), xs
    ),
    "vmap, last axis": lambda w, xs: jax.vmap(gradient, (None, 1), 2)(w, xs.T),
    "vmap of nothing": lambda w, xs: jax.vmap(lambda x: gradient(w, xs) + x)(jnp.arange(3.0)),
    "vmap with a name": by_labels,
    "vmap of the pullback": lambda w, xs: jax.vmap(xform.vjp(lambda w: xs @ w, w)[1])(
        jnp.ones((3, 6, 4))
    ),
    "vmapped pullback": lambda w, xs: jax.vmap(lambda p, y: p(y))(
        *(jax.vmap(lambda x: xform.vjp(lambda w: loss(w, x), w))(xs))[::-1]
    ),
    "jacrev": lambda w, xs: xform.jacrev(lambda w: jnp.tanh(xs @ w))(w),
    "hessian": lambda w, xs: xform.hessian(lambda x: loss(w, x))(xs[0]),
    "hvp": lambda w, xs: xform.hvp(lambda w: loss(w, xs), (w,), (2 * w,)),
    "jvp": lambda w, xs: xform.jvp(gradient, (w, xs), (2 * w, xs)),
    "jvp of vmap": lambda w, xs: xform.jvp(jax.vmap(gradient, (None, 0)), (w, xs), (w, 2 * xs)),
    "vmap of jvp": lambda w, xs: jax.vmap(
        lambda x, v: xform.jvp(lambda w: gradient(w, x), (w,), (v,))
    )(xs, jnp.stack([w] * 6)),
    "jvp of jvp": lambda w, xs: xform.jvp(
        lambda w: xform.jvp(lambda x: gradient(w, x), (xs,), (xs,))[1], (w,), (w,)
    ),
    "JAX's jvp": lambda w, xs: jax.jvp(gradient, (w, xs), (2 * w, xs)),
    "JAX's grad": lambda w, xs: jax.grad(lambda w: jnp.sum(gradient(w, xs) ** 2))(w),
    "grad of grad": lambda w, xs: xform.grad(lambda w: jnp.sum(gradient(w, xs) ** 2))(w),
    "JAX's grad of jit": lambda w, xs: jax.grad(lambda w: jnp.sum(jax.jit(gradient)(w, xs)))(w),
    "linearize": lambda w, xs: xform.linearize(lambda w: gradient(w, xs), w)[1](w),
    "separate loops": separate,
    "integers": lambda w, xs: xform.grad(lambda w, i: jnp.sum(w[i] ** 2))(w, jnp.arange(2)),
    "references": lambda w, xs: _sum_in_reference(w, xs),
    "no derivative": lambda w, xs: jnp.sin(w),
}


def _sum_in_reference(w: Any, xs: Any) -> Any:
    total = jax.new_ref(jnp.zeros_like(w))

    def add(i: Any, _: Any) -> None:
        total[...] += gradient(w, xs[i])

    lax.fori_loop(0, 6, add, None)
    return jax.freeze(total)


def record(f: Callable[..., Any], *args: Any) -> Recorded:
    def trace_once(policy: Any) -> tuple[Any, Any]:
        traced = jax.jit(f).trace(*args)
        return traced.jaxpr, jax.tree.structure(traced.out_info)

    return recorded(min_cut, True, trace_once)


def run(recording: Recorded, policy: Any, *args: Any) -> Any:
    plans = {k: plan_program(problem, policy) for k, problem in recording.problems.items()}
    chosen = Chosen(recording, plans)
    return jax.tree.unflatten(recording.out_tree, jax.jit(chosen.run)(*args))


@pytest.mark.parametrize("name", STEPS)
def test_values_are_the_same_under_each_plan(name: str) -> None:
    want = jax.jit(STEPS[name])(W, XS)
    recording = record(STEPS[name], W, XS)
    for policy in (save_everything, save_nothing):
        got = run(recording, policy, W, XS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), got, want)


PLANNED = ("grad", "vjp", "jit", "scan", "cond", "remat", "vmap", "hvp", "jvp of jvp")


@pytest.mark.parametrize("name", PLANNED)
def test_another_plan_is_another_program(name: str) -> None:
    recording = record(STEPS[name], W, XS)
    assert recording.derivatives

    def program(policy: Any) -> str:
        return str(jax.make_jaxpr(lambda *xs: run(recording, policy, *xs))(W, XS))

    saved, recomputed = program(save_everything), program(save_nothing)
    assert saved.count("tanh ") < recomputed.count("tanh ")
    assert deferred_p.name not in saved + recomputed


def test_equal_derivatives_have_one_plan_and_different_ones_have_two() -> None:
    assert len(record(STEPS["twice"], W, XS).problems) == 1
    both = lambda w, xs: (gradient(w, xs), xform.grad(lambda x: jnp.sum(jnp.sin(x)))(xs))
    assert len(record(both, W, XS).problems) == 2


def test_an_equal_derivative_has_its_own_constants() -> None:
    """Equal programs are compared by the types of their constants, not by the values."""

    def step(w: Any, xs: Any) -> Any:
        return [xform.grad(lambda w, c=c: jnp.sum(jnp.sin(w * c)))(w) for c in (XS[:4], -XS[:4])]

    jax.tree.map(np.testing.assert_array_equal, run(record(step, W, XS), min_cut, W, XS),
                 jax.jit(step)(W, XS))  # fmt: skip


@pytest.mark.parametrize("wrap", ["plain", "scan", "jit", "checkpoint"])
def test_users_functions_and_rules_run_when_it_is_recorded(wrap: str) -> None:
    wraps: dict[str, Any] = {
        "plain": lambda f: f,
        "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
        "jit": lambda f: jax.jit(lambda x: f(x)),
        "checkpoint": lambda f: jax.checkpoint(lambda x: f(x)),
    }
    calls: list[str] = []

    def step(w: Any, xs: Any) -> Any:
        calls.append("step")
        f = jax.custom_vjp(jnp.sin)
        f.defvjp(
            lambda x: (calls.append("forward") or jnp.sin(x), x),
            lambda x, ct: (calls.append("backward") or ct * jnp.cos(x),),
        )
        return xform.grad(lambda x: jnp.sum(wraps[wrap](f)(x)))(w)

    recording = record(step, W, XS)
    seen = list(calls)
    for policy in (save_everything, save_nothing):
        run(recording, policy, W, XS)
    assert calls == seen
    assert seen.count("step") == 1


def test_settings_of_the_trace_hold_for_each_plan() -> None:
    def step(w: Any, xs: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return gradient(w, xs)

    recording = record(step, W, XS)
    text = str(jax.make_jaxpr(lambda *xs: run(recording, save_nothing, *xs))(W, XS))
    assert "Precision.HIGHEST" in text
    assert "precision=None" not in text


def test_a_derivative_in_two_programs_keeps_its_plan_and_the_step_is_traced_again() -> None:
    calls: list[int] = []

    def step(w: Any, xs: Any) -> Any:
        calls.append(0)
        return separate(w, xs), gradient(w, xs[0] * 2)

    recording = record(step, W, XS)
    assert len(calls) == 2
    assert len(recording.problems) == 1


@pytest.mark.parametrize("check", [True, False])
def test_a_derivative_in_a_shard_map(check: bool) -> None:
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])

    def step(w: Any, xs: Any) -> Any:
        local = lambda w, x: lax.psum(gradient(w, x), "x")
        specs = (P(), P("x"))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)(
            w, xs
        )

    recording = record(step, W, XS)
    assert recording.problems
    want = jax.jit(step)(W, XS)
    for policy in (save_everything, save_nothing):
        np.testing.assert_allclose(run(recording, policy, W, XS), want, rtol=1e-5, atol=1e-6)


def test_a_jitted_function_that_is_called_often_stays_one_program() -> None:
    def step(w: Any, xs: Any) -> Any:
        g = jax.jit(gradient)
        return g(w, xs) + g(w, 2 * xs) + g(2 * w, xs)

    recording = record(step, W, XS)
    traced = jax.make_jaxpr(lambda *xs: run(recording, save_nothing, *xs))(W, XS)
    (outer,) = traced.eqns
    calls = [e.params["jaxpr"] for e in outer.params["jaxpr"].eqns if e.primitive.name == "jit"]
    assert len(calls) == 3
    assert all(call is calls[0] for call in calls)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_an_output_that_no_example_changes_has_no_batch_under_any_plan(axis: int | None) -> None:
    y = jnp.arange(3.0)
    batch = Batch(None, (0,), (False,))
    made = y if axis is None else jnp.stack([y, y], axis)
    (got,) = _outputs(batch, [made], (axis,))
    np.testing.assert_array_equal(got, y)
