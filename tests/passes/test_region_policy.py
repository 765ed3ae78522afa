"""`RegionPolicy`: remat regions with named values get another policy."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform
from xform import passes

W = jnp.full((8, 8), 0.1)
X = jnp.ones((4, 8))
SAVING = jax.checkpoint_policies.save_only_these_names("h")


def layer(x, w):
    return jnp.sin(checkpoint_name(jnp.exp(x @ w), "h"))


def unrolled(mark):
    return lambda w, x: jnp.sum(mark(layer)(mark(layer)(x, w), w))


def scanned(mark):
    return lambda w, x: lax.scan(lambda x, _: (mark(layer)(x, w), None), x, None, 3)[0].sum()


def in_calls(mark):
    """A region in a jitted function, in a branch and in a region without names of its own."""
    inner = jax.jit(lambda x, w: mark(layer)(x, w))
    outer = jax.checkpoint(lambda x, w: inner(x, w) * 2.0)
    return lambda w, x: jnp.sum(lax.cond(x.sum() > 0, outer, lambda x, w: x, x, w))


PROGRAMS = {"unrolled": unrolled, "scanned": scanned, "in calls": in_calls}


def saved_bytes(f):
    return xform.residuals(f, W, X, argnums=0).total_bytes


@pytest.mark.filterwarnings("ignore:the remat region at .* changes nothing")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_regions_have_the_policy(name: str) -> None:
    program = PROGRAMS[name]
    rewritten = passes.RegionPolicy(SAVING)(program(jax.checkpoint))
    written = program(lambda f: jax.checkpoint(f, policy=SAVING))
    if name != "in calls":  # there the outer region is rewritten too
        assert saved_bytes(rewritten) == saved_bytes(written) > saved_bytes(program(jax.checkpoint))
    assert "policy=None" in str(jax.make_jaxpr(program(jax.checkpoint))(W, X))
    assert "policy=None" not in str(jax.make_jaxpr(rewritten)(W, X))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("transform", [jax.grad, xform.grad], ids=["jax", "xform"])
def test_values_and_gradients_are_the_same(name: str, transform) -> None:
    f = PROGRAMS[name](jax.checkpoint)
    rewritten = passes.RegionPolicy(SAVING)(f)
    chex.assert_trees_all_equal(rewritten(W, X), f(W, X))
    chex.assert_trees_all_close(transform(rewritten)(W, X), jax.grad(f)(W, X), rtol=1e-6)


def test_regions_without_names_keep_their_policy() -> None:
    f = jax.checkpoint(lambda x: jnp.sin(jnp.exp(x)))
    assert "policy=None" in str(jax.make_jaxpr(passes.RegionPolicy(SAVING)(f))(X))


def test_the_program_of_jax_is_that_of_the_policy() -> None:
    """The gradient by JAX is the same program as with the policy in the source."""
    rewritten = jax.grad(passes.RegionPolicy(SAVING)(scanned(jax.checkpoint)))
    written = jax.grad(scanned(lambda f: jax.checkpoint(f, policy=SAVING)))
    count = lambda f: str(jax.make_jaxpr(f)(W, X)).count(" = ")
    assert count(rewritten) == count(written)
