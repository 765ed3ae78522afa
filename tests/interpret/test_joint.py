"""The joint program: forward and backward part as data, traced once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform._jax import Var
from xform.interpret import emit
from xform.interpret.joint import analyze
from xform.interpret.node import fork_p, join_p
from xform.planner.decide import schedule
from xform.program.ir import program, trace

X = np.array([0.3, -0.7, 1.1], np.float32)


@jax.jit
def large(x):
    for _ in range(50):
        x = x * 1.01
    return jnp.sin(x)


PROGRAMS = {
    "elementwise": lambda x: [jnp.sin(x) * x],
    "scan": lambda x: [lax.scan(lambda c, _: (jnp.sin(c) * x, None), x, None, length=3)[0]],
    "cond": lambda x: [lax.cond(x[0] > 0, jnp.sin, lambda x: x * x, x)],
    "remat": lambda x: [jax.checkpoint(lambda x: jnp.sin(x) * x)(x)],
    "large jit": lambda x: [large(x)],
}


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_forward_part_does_not_depend_on_seconds_and_the_second_part_does(name, push) -> None:
    joint = analyze(trace(PROGRAMS[name], X), (True,), (True,), push)
    dependent = set(joint.seeds)
    for eqn in joint.forward:
        assert not any(isinstance(v, Var) and v in dependent for v in eqn.invars)
    for eqn in joint.backward:
        assert any(isinstance(v, Var) and v in dependent for v in eqn.invars)
        dependent.update(eqn.outvars)
    assert joint.seeded == joint.results == (True,)


UNCHOSEN = {
    "scan": lambda x: lax.scan(lambda c, _: (jnp.sin(c) * c, None), x, None, length=3)[0],
    "while": lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: c**2 + 1, x),
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, lambda x: x * x, x),
    "remat": jax.checkpoint(lambda x: jnp.sin(x) * x),
    "large jit": large,
}


@pytest.mark.parametrize("policy", [xform.policies.save_dots, xform.policies.save_nothing])
@pytest.mark.parametrize("name", UNCHOSEN)
def test_cotangents_simplified_to_zeros_stay_in_the_backward_part(name, policy) -> None:
    """A known predicate drops a value. Its cotangent is zeros, and depends on no seed."""
    f = lambda x: lax.select(np.bool_(False), UNCHOSEN[name](2 * x), 3 * x)
    joint = analyze(trace(lambda x: [f(x)], X), (True,), (True,))
    assert not any(eqn.primitive is join_p for eqn in joint.forward)
    got = jax.jit(lambda x: xform.vjp(f, x, policy=policy)[1](X)[0])(X)
    np.testing.assert_array_equal(got, 3 * X)


def test_a_program_is_analyzed_once_for_its_masks() -> None:
    prog = trace(PROGRAMS["scan"], X)
    one = analyze(prog, (True,), (True,))
    assert analyze(prog, (True,), (True,)) is one
    assert analyze(prog, (True,), (True,), push=True) is not one
    assert schedule(one, xform.policies.save_nothing) is schedule(one, xform.policies.save_nothing)
    assert schedule(one) is not schedule(one, xform.policies.save_nothing)


def test_equal_calls_are_one_call() -> None:
    """Two calls of a network share the saved values, as where a function and its gradient are."""

    def network(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    w, x = jnp.eye(64), jnp.ones((32, 64))
    one, two = (
        xform.residuals(f, w, x)
        for f in (lambda w, x: network(w, x) ** 2, lambda w, x: network(w, x) * network(w, x))
    )
    assert two.total_bytes <= one.total_bytes + 8


def test_a_layer_called_many_times_is_analyzed_once() -> None:
    traces = []

    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    @f.defjvp
    def _(primals, tangents):
        traces.append(1)
        return f(*primals), jnp.cos(primals[0]) * tangents[0]

    layer = jax.jit(lambda x: f(large(x)))

    def loss(x):
        for _ in range(12):
            x = layer(x)
        return jnp.sum(x)

    jax.make_jaxpr(xform.grad(loss))(X)
    assert len(traces) <= 2
    n = len(traces)
    jax.make_jaxpr(xform.grad(lambda x: loss(x) * 2))(X)
    assert len(traces) == n


def test_one_jaxpr_is_one_program() -> None:
    jaxpr = jax.make_jaxpr(jnp.sin)(X)
    assert program(jaxpr) is program(jaxpr)


@pytest.mark.parametrize("name", ["scan", "cond", "remat", "large jit"])
def test_structured_equations_are_a_pair_that_never_leaves(name: str) -> None:
    joint = analyze(trace(PROGRAMS[name], X), (True,), (True,))
    forks = [e for e in joint.forward if e.primitive is fork_p]
    joins = [e for e in joint.backward if e.primitive is join_p]
    assert len(forks) == len(joins) == 1
    assert forks[0].params["node"] is joins[0].params["node"]
    for f in (xform.grad(lambda x: jnp.sum(PROGRAMS[name](x)[0])),
              lambda x: xform.linearize(PROGRAMS[name], x)[1](x)):  # fmt: skip
        assert not re.search("xform_(fork|join)", str(jax.make_jaxpr(f)(X)))


@pytest.mark.parametrize("policy", [None, xform.policies.save_nothing])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_runs_in_two_parts(name: str, policy) -> None:
    joint = analyze(trace(PROGRAMS[name], X), (True,), (True,))
    how = schedule(joint, policy, backend="cpu")
    (y,), kept = emit.forward(how, [jnp.asarray(X)])
    (ct,) = emit.backward(how, kept, [jnp.asarray(X)], [jnp.ones_like(X)], True, whole=True)
    want, pull = jax.vjp(lambda x: PROGRAMS[name](x)[0], X)
    np.testing.assert_allclose(y, want, rtol=1e-6)
    np.testing.assert_allclose(ct, pull(jnp.ones_like(X))[0], rtol=1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_unwanted_outputs_are_not_computed(name: str) -> None:
    how = schedule(
        analyze(trace(PROGRAMS[name], X), (True,), (True,)), xform.policies.save_nothing, True
    )
    run = lambda x: emit.forward(how, [x], (False,))[1]
    assert "sin" not in str(jax.make_jaxpr(run)(X)) or name == "scan"


def test_masks_constants_and_views_are_not_kept() -> None:
    def f(x):
        mask = jnp.tril(jnp.ones((64, 64), bool))
        s = jnp.where(mask, x[:, None] * x[None, :], -1e9)
        return jnp.sum(jax.nn.softmax(s, axis=-1) @ x)

    table = xform.residuals(f, jax.ShapeDtypeStruct((64,), np.float32))
    assert not any(r.dtype == "bool" and r.shape == (64, 64) for r in table)


def test_loop_invariant_residuals_are_not_stacked() -> None:
    def f(x, w):
        step = lambda c, _: (c * jnp.sin(w) + jnp.exp(w), None)
        return jnp.sum(lax.scan(step, x, None, length=100)[0])

    shape = jax.ShapeDtypeStruct((8,), np.float32)
    table = xform.residuals(f, shape, shape, policy=xform.policies.save_everything)
    rows = [r for r in table if r.kind == "kept"]
    assert rows
    assert all(r.trips == 1 for r in rows)
