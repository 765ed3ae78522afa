"""Rules of custom functions run when JAX runs them: the state that they read is that of the call.

The cases are in `tests/rules/call_times.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.rules.call_times import CASES, of_nested, times
from xform.errors import NotDifferentiable, OtherProgram


def result(lib: Any, name: str, jitted: bool) -> list[Any]:
    f = CASES[name](lib)
    return jax.tree.leaves((jax.jit(f) if jitted else f)(jnp.float32(0.7)))


# Outside jit, JAX 0.12 runs no operation on an abstract mesh.
RUNS = [
    (name, jitted) for name in CASES for jitted in (True, False) if jitted or "mesh" not in name
]


@pytest.mark.filterwarnings("ignore:.with mesh.*:DeprecationWarning")
@pytest.mark.parametrize(("name", "jitted"), RUNS)
def test_custom_rules_read_the_same_python_state_as_under_jax(name: str, jitted: bool) -> None:
    np.testing.assert_allclose(result(xform, name, jitted), result(jax, name, jitted), rtol=1e-5)


@pytest.mark.parametrize("policy", ["save_nothing", "save_everything", "save_dots"])
def test_a_policy_outside_jit_changes_nothing(policy: str) -> None:
    def f(x: Any) -> Any:
        for i in range(3):
            x = times(lambda: i + 1)(x)  # noqa: B023 - the value at the call counts
        return x

    assert float(xform.grad(f, policy=policy)(1.0)) == 6.0


def test_a_rule_that_closes_over_an_active_value_is_refused() -> None:
    def f(x: Any) -> Any:
        y = jnp.sin(x)
        g = jax.custom_jvp(lambda z: z * y)
        g.defjvp(lambda zs, dzs: (zs[0] * y, dzs[0] * y))
        return g(x)

    with pytest.raises(NotDifferentiable, match="closes over a value that is being diff"):
        jax.jit(xform.grad(f))(1.0)


def test_a_pullback_whose_values_were_not_kept_is_refused() -> None:
    state = [1.0]
    g = jax.custom_vjp(lambda x: x**2)
    g.defvjp(lambda x: (x**2, x), lambda x, ct: (ct * x * state[0],))
    y, pull = jax.jit(lambda x: xform.vjp(lambda x: jnp.sin(g(x)), x))(0.5)
    first = pull(y)[0]
    np.testing.assert_allclose(first, jax.vjp(lambda x: jnp.sin(g(x)), 0.5)[1](y)[0], rtol=1e-6)
    state[0] = 2.0
    with pytest.raises(OtherProgram, match="computes something else than when vjp was called"):
        pull(y)


@pytest.mark.parametrize("in_loop", [False, True])
def test_draws_do_not_run_again_for_a_pullback_that_has_changed(in_loop: bool) -> None:
    state = [1.0]
    g = jax.custom_vjp(jnp.sin)
    g.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * (x if state[0] > 1 else jnp.cos(x)),))

    def draw_and_call(x: Any, _: Any = None) -> Any:
        return g(x * lax.rng_uniform(0.0, 1.0, (3,))), None

    def run(x: Any) -> Any:
        state[0] = 1.0
        one = lambda x: draw_and_call(x)[0]
        _, pull = xform.vjp(lambda x: loop(x) if in_loop else one(x), x)
        state[0] = 2.0
        return pull(jnp.ones(3))

    loop = lambda x: lax.scan(draw_and_call, x, length=2)[0]
    with pytest.raises(NotDifferentiable, match=r"rng_uniform\), and it runs again"):
        jax.jit(run)(jnp.arange(3.0))


def _scores(w: Any, x: Any, labels: Any) -> Any:
    f = jax.custom_vjp(lambda logits, labels: logits[jnp.arange(3), labels])
    f.defvjp(
        lambda logits, labels: (f(logits, labels), (logits, labels)),
        lambda kept, ct: (kept[0] * jax.nn.one_hot(kept[1], 4) * ct[:, None], None),
    )
    return jnp.sum(f(jax.nn.relu(x @ w) @ w, labels) ** 2)


OUTER: dict[str, Any] = {
    "alone": lambda g, w: g(w),
    "gradient": lambda g, w: xform.grad(lambda w: jnp.sum(g(w) ** 2))(w),
    "JAX's gradient": lambda g, w: jax.grad(lambda w: jnp.sum(g(w) ** 2))(w),
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_plan_fits_known_data_and_derivatives_around(outer: str, jitted: bool) -> None:
    w, x, labels = jnp.eye(4) + 0.5, jnp.arange(12.0).reshape(3, 4) - 5, jnp.array([0, 3, 1])
    plan = xform.plan(_scores, w, x, labels, policy="save_nothing")
    results = [
        (jax.jit if jitted else lambda f: f)(
            lambda w, g=g: OUTER[outer](lambda w: g(w, x, labels), w)
        )(w)
        for g in (xform.grad(_scores, policy=plan), jax.grad(_scores))
    ]
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_jax_differentiates_a_gradient_with_staged_rules() -> None:
    of_both = lambda lib: jax.grad(of_nested(2)(lib))
    x = jnp.float32(0.7)
    np.testing.assert_allclose(jax.jit(of_both(xform))(x), jax.jit(of_both(jax))(x), rtol=1e-5)
