"""Inactive inputs cost nothing: an operation without a derivative adds no equation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

import xform
from xform._jax import scan_counts
from xform.interpret.activity import path
from xform.program.ir import trace

X = np.array([0.3, -0.7, 1.1], np.float32)


def primitives(jaxpr) -> list[str]:
    """Calls are not counted, because small ones are inlined."""
    out = []
    for eqn in jaxpr.eqns:
        out += [eqn.primitive.name] * (eqn.primitive.name != "jit")
        for inner in jaxprs_in_params(eqn.params):
            out += primitives(inner)
    return out


def equations(f, *args) -> list[str]:
    return primitives(jax.make_jaxpr(f)(*args).jaxpr)


def heavy(y):
    """A nonlinear function with a loop, a call and a branch."""
    y = lax.scan(lambda c, _: (jnp.sin(c) * y, c), y, None, length=3)[0]
    y = jax.jit(lambda y: jnp.exp(y) / (1 + y))(y)
    return jnp.sum(lax.cond(y[0] > 0, jnp.tanh, jnp.cosh, y) ** 2)


def test_an_inactive_argument_adds_the_equations_of_its_forward_pass_only() -> None:
    forward = equations(heavy, X)
    alone = equations(xform.grad(lambda x: jnp.sum(jnp.sin(x))), X)
    both = equations(xform.grad(lambda x, y: jnp.sum(jnp.sin(x)) * heavy(y)), X, X)
    # Value and gradient are each multiplied by heavy(y).
    assert sorted(both) == sorted([*alone, *forward, "mul", "mul"])


def test_the_same_in_forward_mode() -> None:
    forward = equations(heavy, X)
    f = lambda x, y: jnp.sum(jnp.sin(x)) * heavy(y)
    got = equations(lambda x, y: xform.jvp(lambda x: f(x, y), (x,), (x,)), X, X)
    alone = equations(lambda x: xform.jvp(lambda x: jnp.sum(jnp.sin(x)), (x,), (x,)), X)
    assert sorted(got) == sorted([*alone, *forward, "mul", "mul"])


def test_stop_gradient_severs() -> None:
    f = lambda x: jnp.sum(jnp.sin(x)) * heavy(lax.stop_gradient(x))
    g = equations(xform.grad(f), X)
    assert g.count("cos") == 1 + equations(heavy, X).count("cos")
    assert g.count("scan") == equations(heavy, X).count("scan")
    np.testing.assert_allclose(xform.grad(f)(X), jax.grad(f)(X), rtol=1e-5)
    assert (xform.grad(lambda x: jnp.sum(lax.stop_gradient(x)))(X) == 0).all()


def test_unused_auxiliary_outputs_add_no_equations() -> None:
    f = lambda x: (jnp.sum(x * 2), heavy(x))
    g = equations(xform.grad(f, has_aux=True), X)
    assert g.count("scan") == 1
    h = equations(lambda x: xform.grad(f, has_aux=True)(x)[0], X)
    assert h.count("cosh") <= 1


def test_rounding_and_comparison_carry_nothing() -> None:
    f = lambda x: jnp.sum(x * jnp.round(jnp.sin(x)) * (jnp.exp(x) > 1) * jnp.argmax(x))
    g = equations(xform.grad(f, policy=xform.policies.save_everything), X)
    assert "cos" not in g
    assert g.count("exp") == 1


def test_an_inactive_carry_has_no_cotangent_carry() -> None:
    def f(x):
        step = lambda c, _: ((c[0] * c[1], jnp.sin(c[1]), c[2] + 1), None)
        return jnp.sum(lax.scan(step, (x, jnp.ones(3), 0), None, length=3)[0][0])

    backward = [e for e in jax.make_jaxpr(xform.grad(f))(X).eqns if e.primitive.name == "scan"][-1]
    assert scan_counts(backward.params)[1] == 1
    assert "cos" not in primitives(backward.params["jaxpr"].jaxpr)


def test_masks_of_a_path() -> None:
    prog = trace(lambda x, y, z: [jnp.sin(x) * y, z * 2.0, y + 1.0], X, X, X)
    way = path(prog, (True, False, False))
    assert way.inputs == (True, False, False)
    assert way.outputs == (True, False, False)
    assert len(way.steps) == 2
    assert path(prog, (True, True, True), (False, True, False)).inputs == (False, False, True)
    assert path(prog, (False,) * 3).steps == {}


def test_a_missing_rule_off_the_path_is_no_error() -> None:
    primitive = jax.extend.core.Primitive("without_a_rule_for_activity")
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    f = lambda x, y: jnp.sum(x) * jnp.sum(primitive.bind(y)) * jnp.sum(
        primitive.bind(lax.stop_gradient(x))
    )  # fmt: skip
    assert xform.grad(f)(jnp.asarray(X), jnp.asarray(X)).shape == (3,)
    with pytest.raises(xform.errors.MissingRule):
        xform.grad(f, 1)(jnp.asarray(X), jnp.asarray(X))
