"""A recompute that draws the same numbers again passes JAX's check that no key is used twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.reference import close
from xform import policies

X = np.array([0.3, -0.7, 1.1], np.float32)


def drop(x, key):
    return jnp.sin(x * jax.random.uniform(key, x.shape))


def branch(x, key):
    return lax.cond(x[0] > 0, drop, lambda x, _: x, x, key)


def scanned(x, key):
    return lax.scan(lambda c, k: (drop(c, k), None), x, jax.random.split(key, 3))[0]


def carried(x, key, loop=lambda step, s: lax.fori_loop(0, 3, lambda _, s: step(s), s)):
    def step(state):
        x, key = state
        key, now = jax.random.split(key)
        return drop(x, now), key

    return loop(step, (x, key))[0]


def unknown_length(x, key):
    def loop(step, s):
        return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, *step(s[1:])), (0, *s))[1:]

    return carried(x, key, loop)


PROGRAMS = {
    "plain": (drop, drop),
    "cond": (branch, branch),
    "remat": (jax.checkpoint(drop), drop),
    "scan": (scanned, scanned),
    "carried keys": (carried, carried),
    "while": (unknown_length, carried),
}


@pytest.mark.parametrize("policy", [None, policies.save_nothing])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_key_counts_as_used_twice(name: str, policy) -> None:
    f, same = PROGRAMS[name]
    g = xform.grad(lambda x, key: jnp.sum(f(x, key)), policy=policy)
    key = jax.random.key(0)
    with jax.debug_key_reuse(True):
        got = jax.jit(g)(X, key), g(X, jax.random.clone(key))
    want = jax.grad(lambda x, key: jnp.sum(same(x, key)))(X, jax.random.clone(key))
    close(got, (want, want), 1e-5)


def test_without_the_check_nothing_is_emitted() -> None:
    g = xform.grad(lambda x, key: jnp.sum(branch(x, key)), policy=policies.save_nothing)
    assert "random_clone" not in str(jax.make_jaxpr(g)(X, jax.random.key(0)))
