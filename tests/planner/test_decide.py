"""Plans from policies: they save what the policy says, and what JAX would save."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform
from tests.reference import close
from tests.versions import saved_residuals
from xform import policies

X = np.array([0.3, -0.7, 1.1], np.float32)
VECTOR = jax.ShapeDtypeStruct((3,), np.float32)


def kept(f, *args, policy=None):
    """Return shapes and operations of the computed values that are saved."""
    table = xform.residuals(f, *args, policy=policy)
    return collections.Counter((r.type, r.operation) for r in table if r.kind != "argument")


FUNCTIONS = {
    "chain": lambda x: jnp.sin(jnp.cos(jnp.exp(x))),
    "products": lambda x: jnp.tanh(x) * jnp.exp(x) * x,
    "dots": lambda x: jnp.sum(jnp.tanh(jnp.outer(x, x) @ x) @ jnp.outer(x, x)),
    "linear": lambda x: 2.0 * x + jnp.cumsum(x),
    "division": lambda x: x / (1.0 + x * x),
    "reductions": lambda x: jnp.sum(x) * jnp.max(x) * jnp.prod(x),
    "softmax": lambda x: jax.nn.softmax(x) * x,
    "norm": lambda x: (x - jnp.mean(x)) * lax.rsqrt(jnp.var(x) + 1e-6),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_minimum_cut_saves_no_more_than_jax(name: str) -> None:
    f = FUNCTIONS[name]
    ours = xform.residuals(f, VECTOR, policy=policies.MinCut()).total_bytes
    jaxs = saved_residuals(f, jnp.asarray(X))
    assert ours <= sum(a.size * a.dtype.itemsize for a, why in jaxs if "argument" not in why)


@pytest.mark.filterwarnings("ignore:.*which no value has")
def test_the_saved_sets_of_named_policies() -> None:
    def f(x):
        h = checkpoint_name(jnp.sin(jnp.outer(x, x) @ x), "h")
        return jnp.sum(jnp.sin(checkpoint_name(jnp.cos(h), "g")))

    v = "float32[3]"
    assert kept(f, VECTOR, policy=policies.save_nothing) == {}
    assert kept(f, VECTOR, policy=policies.save_only_these_names("h")) == {(v, "sin"): 1}
    assert kept(f, VECTOR, policy=policies.save_only_these_names("g")) == {(v, "cos"): 1}
    assert kept(f, VECTOR, policy=policies.save_any_names_but_these("h")) == {(v, "cos"): 1}
    assert kept(f, VECTOR, policy=policies.save_dots) == {(v, "dot_general"): 1}
    assert kept(f, VECTOR, policy=policies.save_only_these_names("none such")) == {}


def test_a_callable_policy_is_asked_with_types_and_parameters() -> None:
    asked = []

    def policy(prim, *avals, **params):
        asked.append((prim.name, [a.shape for a in avals], sorted(params)))
        return prim.name == "exp"

    f = lambda x: jnp.sum(jnp.sin(jnp.exp(jnp.outer(x, x) @ x)))
    assert kept(f, VECTOR, policy=policy) == {("float32[3]", "exp"): 1}
    assert any(name == "exp" and shapes == [(3,)] for name, shapes, _ in asked)


def test_values_that_the_backward_pass_does_not_need_are_never_kept() -> None:
    f = lambda x: jnp.sum(checkpoint_name(x * 2.0, "h"))
    for policy in (None, policies.save_everything, policies.save_only_these_names("h")):
        assert kept(f, VECTOR, policy=policy) == {}


def test_a_value_kept_twice_is_kept_once() -> None:
    f = lambda x: (lambda h: jnp.sum(h * h * jnp.sin(h) * jnp.cos(h)))(jnp.exp(x))
    rows = [r.operation for r in xform.residuals(f, VECTOR) if r.kind == "kept"]
    assert rows.count("exp") <= 1


def scan_of(body):
    def f(x, w):
        return jnp.sum(lax.scan(lambda c, _: (body(c, w), None), x, None, length=5)[0])

    return f


def test_a_loop_keeps_its_carry_and_runs_its_body_again() -> None:
    f = scan_of(lambda c, w: jnp.sin(checkpoint_name(jnp.exp(jnp.sin(c)), "h") * w))
    v = "float32[3]"
    assert kept(f, VECTOR, VECTOR, policy=policies.save_nothing) == {(v, "sin"): 1}
    table = xform.residuals(f, VECTOR, VECTOR, policy=policies.save_only_these_names("h"))
    assert {(r.kind, r.operation, r.trips) for r in table if r.kind != "argument"} == {
        ("carry", "sin", 5),
        ("kept", "exp", 5),
    }


def layers(ws, x, scanned=False):
    """A few layers, with a loss that contains a product too."""
    layer = lambda x, w: (x + jnp.tanh(jnp.sin(jnp.exp(x @ w)) @ w.T), None)
    if scanned:
        x, _ = lax.scan(layer, x, ws)
    else:
        for w in ws:
            x, _ = layer(x, w)
    return jnp.sum(jax.nn.log_softmax(x @ ws[0])[:, 0] ** 2)


@pytest.mark.parametrize("scanned", [False, True])
def test_save_nothing_takes_no_more_temp_memory_than_jax_grad(scanned) -> None:
    """The recomputed forward part first saves the values on a minimum cut, and nothing else."""
    ws, x = jnp.ones((6, 64, 64)) / 64, jnp.linspace(0, 1, 1024 * 64).reshape(1024, 64)
    f = lambda ws, x: layers(ws, x, scanned)
    temp = lambda g: jax.jit(g).lower(ws, x).compile().memory_analysis().temp_size_in_bytes
    ours, theirs = xform.grad(f, (0, 1), policy=policies.save_nothing), jax.grad(f, (0, 1))
    assert temp(ours) <= (1.0 if scanned else 0.7) * temp(theirs)
    for got, want in zip(jax.jit(ours)(ws, x), jax.jit(theirs)(ws, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    # An unknown cotangent delays the recomputed forward part.
    ct = jnp.float32(-2)
    pull = jax.jit(lambda ws, x, ct: xform.vjp(f, ws, x, policy=policies.save_nothing)[1](ct))
    for got, want in zip(pull(ws, x, ct), theirs(ws, x), strict=True):
        np.testing.assert_allclose(got, -2 * want, rtol=2e-5, atol=1e-6)
    # A recorded plan is the same.
    plan = xform.plan(f, ws, x, argnums=(0, 1), policy=policies.save_nothing)
    assert temp(xform.grad(f, (0, 1), policy=plan)) == temp(ours)


@pytest.mark.filterwarnings("ignore:the remat region at .* changes nothing")
def test_a_region_around_a_loop_keeps_nothing_of_it() -> None:
    f = scan_of(lambda c, w: jnp.sin(c * w))
    assert kept(xform.remat(f), VECTOR, VECTOR) == {}
    inside = scan_of(xform.remat(lambda c, w: jnp.sin(jnp.sin(c) * w)))
    assert kept(inside, VECTOR, VECTOR) == {("float32[3]", "sin"): 1}


@pytest.mark.parametrize("policy", [None, policies.save_nothing, policies.save_dots])
def test_random_numbers_with_effects_and_prints_are_not_run_again(policy, capfd) -> None:
    def f(x):
        jax.debug.print("once {}", x[0])
        return jnp.sum(jnp.sin(jnp.sin(x)))

    close(
        jax.jit(xform.grad(f, policy=policy))(X),
        jax.grad(lambda x: jnp.sum(jnp.sin(jnp.sin(x))))(X),
        1e-5,
    )
    jax.effects_barrier()
    assert capfd.readouterr().out.count("once") == 1


def test_callbacks_with_results_are_kept_and_not_called_again() -> None:
    calls = []

    def host(x):
        calls.append(1)
        return np.asarray(x) * 2

    def f(x):
        y = jax.experimental.io_callback(host, VECTOR, lax.stop_gradient(x))
        return jnp.sum(jnp.sin(x * y) * y)

    for policy in (None, policies.save_nothing):
        calls.clear()
        jax.jit(xform.grad(f, policy=policy))(X).block_until_ready()
        jax.effects_barrier()
        assert len(calls) == 1


@pytest.mark.parametrize("policy", [policies.save_nothing, policies.save_dots])
def test_plans_never_change_a_value(policy) -> None:
    def f(x):
        h = jnp.tanh(jnp.outer(x, x) @ x)
        h = lax.scan(lambda c, t: (jnp.sin(c) * t, c), h, x)[1].sum(0)
        return jnp.sum(lax.cond(x[0] > 0, jnp.exp, jnp.cos, h) * jax.nn.softmax(h))

    everything = xform.grad(f, policy=policies.save_everything)
    np.testing.assert_array_equal(xform.grad(f, policy=policy)(X), everything(X))
    close(xform.grad(f)(X), jax.grad(f)(X), 1e-4)


def test_a_row_of_an_array_is_read_where_the_array_is() -> None:
    """Since JAX 0.12 a loop over an array is `unstack`. Its results are not saved in addition."""

    def f(ws, x):
        for w in lax.unstack(ws):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    kept = xform.residuals(f, jnp.ones((3, 8, 8)), jnp.ones((4, 8)), policy=policies.MinCut())
    assert "unstack" not in {r.operation for r in kept}
    assert "ws" in {r.operation for r in kept if r.kind == "argument"}
