"""Loops, branches, calls and custom rules: nested, with every set of saved values, against JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.parameters import slow
from tests.reference import close, grads_agree
from tests.rules.programs import (
    POLICIES,
    X,
    bend,
    bowl,
    large,
    loop,
    named,
    optimized,
    powered,
    small,
    softened,
    two_results,
)

pytestmark = pytest.mark.usefixtures("x64")


def scan_in_scan(x):
    def inner(c, t):
        h = named(bend(c * x))
        return h * t, h * h

    def outer(c, t):
        c, ys = lax.scan(inner, c * t, jnp.arange(1.0, 3.0))
        return bowl(c) * x, ys.sum(0)

    return loop(outer, x, jnp.array([0.5, 1.5, 2.0]))


def cond_in_scan(x):
    def step(c, i):
        branches = (lambda c: named(bend(c)) * x, lambda c: bowl(-c * c), lambda c: 2.0 * x)
        return lax.switch(i, branches, c), lax.cond(i > 0, lambda: c * x, lambda: x)

    return loop(step, x, jnp.array([0, 1, 2, 0]), length=4)


def scan_in_cond(x):
    def long(x):
        return lax.scan(lambda c, _: (named(bend(c)) * x, c), x, None, length=3)

    def short(x):
        return x * x, jnp.zeros((3, *x.shape))

    return sum(
        jnp.sum(y * x) for p in (True, False) for y in lax.cond(x[0] > 0, long, short, p * x)
    )


def remat_in_scan(x):
    policy = xform.policies.save_only_these_names("h")
    layer = xform.remat(lambda c: bend(named(bend(c) * x)) ** 2, policy=policy)
    bare = jax.checkpoint(lambda c: bowl(named(bowl(c))) * x)
    return loop(lambda c, _: (bare(layer(c)), layer(c * x)), x)


def scan_in_remat(x):
    def run(x):
        return loop(lambda c, t: (named(bend(c * t)) * x, c), x, jnp.arange(1.0, 4.0))

    kept = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names("h"))
    return xform.remat(run)(x) + kept(bowl(x))


NESTED = {
    "scan in scan": scan_in_scan,
    "cond in scan": cond_in_scan,
    "scan in cond": scan_in_cond,
    "remat in scan": remat_in_scan,
    "scan in remat": scan_in_remat,
    "remat in remat": lambda x: jnp.sum(
        xform.remat(lambda x: xform.remat(lambda x: named(bend(x)) * x)(bowl(x)))(x)
    ),
    "cond in cond": lambda x: jnp.sum(
        lax.cond(
            x[0] > 0,
            lambda x: lax.cond(x[1] > 0, bend, lambda x: named(bowl(x)) * x, x),
            lambda x: x * x,
            x,
        )
    ),
    "small jit in scan": lambda x: loop(lambda c, _: (small(named(c * x), x), c), x),
    "large jit in scan": lambda x: loop(lambda c, _: (large(c, x), c), x),
    "scan in large jit": lambda x: jnp.sum(
        jax.jit(lambda x: large(x, x) * loop(lambda c, _: (bend(c) * x, c), x))(x)
    ),
    "large jit twice": lambda x: jnp.sum(large(large(x, x), bowl(x))),
    "custom_jvp in scan": lambda x: loop(lambda c, _: (softened(named(c * x), x), c), x),
    "custom_vjp in scan": lambda x: loop(lambda c, _: (powered(3, named(c * x), x), c), x),
    "custom_vjp with symbolic zeros in scan": lambda x: loop(
        lambda c, _: (two_results(bend(c), x)[0], None), x
    ),
    "custom_vjp with optimize_remat in remat in scan": lambda x: loop(
        lambda c, _: (xform.remat(lambda c: optimized(optimized(c) * x))(c), c), x
    ),
    "custom_vjp in cond": lambda x: jnp.sum(
        lax.cond(x[0] > 0, lambda x: powered(2, x, x), lambda x: softened(x, x), x)
    ),
    "solve in scan": lambda x: loop(
        lambda c, _: (jnp.linalg.solve(jnp.diag(2 + bowl(c)) + jnp.outer(x, x) / 9, c), c), x
    ),
}


@pytest.mark.parametrize("name", slow(NESTED, *list(NESTED)[1::2]))
def test_nested_programs_at_every_saved_set(name: str) -> None:
    grads_agree(NESTED[name], X, policies=POLICIES, ways=("jit", "vmap"))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("name", NESTED)
def test_nested_programs_run_eagerly(name: str, policy) -> None:
    grads_agree(NESTED[name], X, policies=(policy,), ways=("alone",))


def dots_in_scan_in_scan(x, w):
    def inner(c, _):
        return bend(c @ w), c

    def outer(c, t):
        c, ys = lax.scan(inner, c + t, None, length=2)
        return c @ w, ys.sum(0)

    return loop(outer, x, jnp.arange(3.0))


@pytest.mark.parametrize(
    "policy", [xform.policies.save_dots, jax.checkpoint_policies.dots_with_no_batch_dims_saveable]
)
def test_nested_scans_that_save_dots(policy) -> None:
    w = np.linspace(-0.5, 0.7, 9).reshape(3, 3)
    grads_agree(dots_in_scan_in_scan, X, w, argnums=(0, 1), policies=(policy,))


def test_repeated_calls_of_a_large_jit_share_one_jaxpr_per_pass() -> None:
    def f(x):
        for _ in range(4):
            x = large(x, x)
        return jnp.sum(x)

    jaxpr = jax.make_jaxpr(xform.grad(f))(X)
    calls = [e for e in jaxpr.eqns if e.params.get("name", "").startswith("large")]
    assert len(calls) == 8
    assert len({id(e.params["jaxpr"]) for e in calls}) == 2


@pytest.mark.parametrize("inline", [True, False])
def test_donation_and_other_options_of_jit_do_not_reach_the_derivative(inline: bool) -> None:
    f = jax.jit(lambda x, n: jnp.sin(x) * n, static_argnums=1, donate_argnums=0, inline=inline)
    x = jnp.asarray(X)
    close(xform.grad(lambda x: jnp.sum(f(x, 3)))(x), 3 * jnp.cos(X))
    x.block_until_ready()


def test_named_calls_and_named_scopes() -> None:
    def f(x):
        with jax.named_scope("outer"):
            return jnp.sum(jax.named_call(bend, name="inner")(x) * x)

    grads_agree(f, X)


def test_effects_run_once_in_the_forward_pass(capfd) -> None:
    def f(x):
        jax.debug.print("seen {}", x[0])
        return jnp.sum(x * x)

    for way in (f, lambda x: lax.cond(True, f, jnp.sum, x), xform.remat(f)):
        close(jax.jit(xform.grad(way))(X), 2 * X)
        jax.effects_barrier()
        assert capfd.readouterr().out.count("seen") == 1
