"""Dropped programs leave nothing behind: no Program, no jaxpr, no buffer."""

import collections
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform import policies
from xform._jax import Jaxpr
from xform.interpret.joint import Joint, Schedule
from xform.program.ir import Program

Loss = Callable[[Any], Any]
X = np.ones(4, np.float32)
KEPT = (Program, Joint, Schedule, Jaxpr, type(jax.make_jaxpr(lambda x: x)(0.0)))


def loss(i: int) -> Loss:
    """Return a unique function with an array of its own."""
    c = jnp.full(4, float(i))
    return lambda x: jnp.sum(jnp.sin(x * c) * (i + 1.0))


def staged(f: Loss) -> None:
    jax.make_jaxpr(f)(X)


def by_vjp(f: Loss) -> None:
    y, pull = xform.vjp(jax.jit(f), X)
    pull(y)


def large(f: Loss) -> Loss:
    """Return a call that is not inlined."""

    @jax.jit
    def called(x):
        for _ in range(50):
            x = jnp.sin(x)
        return f(x)

    return lambda x: called(x) + called(x * 2.0)


def looped(f: Loss) -> Loss:
    return lambda x: jnp.sum(lax.scan(lambda c, _: (jnp.sin(c) * f(c), None), x, length=6)[0])


def while_looped(f: Loss) -> Loss:
    step = lambda s: (s[0] + 1, s[1] * f(s[1]))
    return lambda x: jnp.sum(lax.while_loop(lambda s: s[0] < 3, step, (0, x))[1])


def static(f: Loss) -> Loss:
    held = xform.checkpoint(lambda x, how: f(x) * how["n"], static_argnums=1)
    chosen = xform.checkpoint(lambda x, n: f(x) * n, static_argnums=1)
    return lambda x: held(x, {"n": 2.0}) + chosen(x, 3.0)


def by_rule(f: Loss) -> Loss:
    made = jax.custom_vjp(f)
    made.defvjp(lambda x: (f(x), x), lambda x, ct: (x * ct,))
    return lambda x: made(x)


WAYS: dict[str, Callable[[Loss], Any]] = {
    "grad": lambda f: xform.grad(f)(X),
    "grad, traced": lambda f: staged(xform.grad(f)),
    "vjp of a call": by_vjp,
    "large call": lambda f: staged(xform.grad(large(f))),
    "jvp of a call": lambda f: xform.jvp(jax.jit(f), (X,), (X,)),
    "linearize": lambda f: xform.linearize(f, X)[1](X),
    "hessian": lambda f: staged(xform.hessian(f)),
    "remat": lambda f: xform.grad(xform.remat(f))(X),
    "remat by a cut": lambda f: staged(xform.grad(xform.remat(f, policy=policies.min_cut))),
    "remat of closures": lambda f: staged(xform.grad(lambda x: xform.remat(lambda y: f(x * y))(x))),
    "static arguments": lambda f: staged(xform.grad(static(f))),
    "scan": lambda f: staged(xform.grad(looped(f))),
    "scan in a budget": lambda f: staged(
        xform.grad(looped(f), policy=policies.budget(250, of="saved"))
    ),
    "while": lambda f: staged(xform.grad(while_looped(f))),
    "cond": lambda f: staged(xform.grad(lambda x: lax.cond(x[0] > 0, f, lambda x: -f(x), x))),
    "cond in a budget": lambda f: staged(
        xform.grad(
            lambda x: lax.cond(x[0] > 0, f, lambda x: -f(x), x),
            policy=policies.budget(10**6, verify=False),
        )
    ),
    "custom_vjp": lambda f: xform.grad(by_rule(f))(X),
    "policy, compiled": lambda f: jax.jit(xform.grad(f, policy=policies.save_nothing))(X),
    "plan": lambda f: xform.plan(f, X, policy=policies.budget(10**6, of="saved")),
    "passes": lambda f: xform.passes.Pipeline([xform.passes.Inline(), xform.passes.Cse()])(f)(X),
}


def alive() -> dict[str, int]:
    while gc.collect():  # freeing a jaxpr frees its Program, which frees nested ones
        pass
    found = collections.Counter(type(x).__name__ for x in gc.get_objects() if isinstance(x, KEPT))
    return {**found, "buffers": len(jax.live_arrays())}


def check(ways: list[str], times: int) -> None:
    for i in range(2):  # objects that are made once
        for way in ways:
            WAYS[way](loss(i))
    before = alive()
    for i in range(2, 2 + times):
        for way in ways:
            WAYS[way](loss(i))
    after = alive()
    assert {k: n for k, n in after.items() if n > before.get(k, 0)} == {}


def test_dropped_programs_leave_no_live_objects() -> None:
    check(list(WAYS), 3)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_hundred_are_gone(way: str) -> None:
    check([way], 200)


def test_one_program_keeps_only_the_last_plans() -> None:
    f = jax.jit(large(loss(1)))
    staged(xform.grad(f))
    for i in range(20):
        staged(xform.grad(f, policy=lambda *_, i=i, **__: bool(i % 2)))
    before = alive()
    for i in range(20):
        staged(xform.grad(f, policy=lambda *_, i=i, **__: bool(i % 2)))
    assert alive()["Schedule"] <= before["Schedule"]


def test_the_collector_is_on_around_users_code() -> None:
    seen = []

    @jax.custom_jvp
    def f(x):
        seen.append(gc.isenabled())
        return jnp.sin(x)

    f.defjvp(lambda xs, dxs: (f(*xs), dxs[0] * (seen.append(gc.isenabled()) or 2.0)))
    before = gc.get_threshold()
    staged(xform.grad(lambda x: f(x).sum(), policy=lambda *_, **__: seen.append(gc.isenabled())))
    assert len(seen) == 2
    assert all(seen)
    assert gc.get_threshold() == before


def test_cycles_are_searched_for_as_ever_where_operations_run_one_by_one() -> None:
    seen = []

    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda xs, dxs: (f(*xs), dxs[0] * (seen.append(gc.get_threshold()) or 2.0)))
    usual = gc.get_threshold()
    push = lambda x: xform.jvp(f, (x,), (x,))
    push(1.0)
    assert seen == [usual]
    jax.make_jaxpr(push)(1.0)
    assert seen[1:] != [usual]  # a trace remains
    assert gc.get_threshold() == usual
