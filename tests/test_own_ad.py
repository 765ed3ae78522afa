"""The guard of `own_ad` catches JAX's AD under xform, and nothing else."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xform
from tests.own_ad import EnteredJaxAD

VIOLATIONS = {
    "grad": "jax.grad(jnp.sin)(1.0)",
    "jvp": "jax.jvp(jnp.sin, (1.0,), (1.0,))",
    "vjp": "jax.vjp(jnp.sin, 1.0)",
    "linearize": "jax.linearize(jnp.sin, 1.0)",
    "hessian": "jax.hessian(jnp.sin)(1.0)",
    "under jit": "jax.jit(jax.grad(jnp.sin))(1.0)",
    "under vmap": "jax.vmap(jax.grad(jnp.sin))(jnp.ones(2))",
    "of a scan": "jax.grad(lambda x: lax.scan(lambda c, _: (c * x, c), x, None, 2)[0])(1.0)",
    "transpose": "jax.linear_transpose(lambda x: lax.cond(True, lax.neg, jnp.copy, x), 1.0)(1.0)",
}


def as_ours(source: str, name: str = "interpret/fake.py"):
    """Compile a function as if its source stood in a file of xform."""
    place = Path(xform.__file__).parent / name
    space = {"jax": jax, "jnp": jnp, "lax": lax}
    exec(compile(f"def entry(*args):\n    return {source}", str(place), "exec"), space)
    return space["entry"]


@pytest.mark.parametrize("what", VIOLATIONS)
def test_entering_jax_ad_from_xform_raises(what: str) -> None:
    with pytest.raises(EnteredJaxAD, match=r"xform/interpret/fake\.py:2 \(entry\)"):
        as_ours(VIOLATIONS[what])()


def test_entering_jax_ad_within_an_outer_jax_transform_raises() -> None:
    entry = as_ours("jax.grad(jnp.sin)(args[0])")
    with pytest.raises(EnteredJaxAD):
        jax.grad(entry)(1.0)
    with pytest.raises(EnteredJaxAD):
        xform.grad(entry)(1.0)


def test_running_a_pullback_of_jax_from_xform_raises() -> None:
    _, pull = jax.vjp(jnp.sin, 1.0)
    with pytest.raises(EnteredJaxAD, match="backward_pass3"):
        as_ours("args[0](1.0)")(pull)


def test_doors_to_the_users_function_are_open_and_public_checks_may_compare() -> None:
    as_ours("jax.grad(jnp.sin)(1.0)", "testing/__init__.py")()
    chex.assert_trees_all_close(xform.grad(jax.grad(jnp.sin))(1.0), -jnp.sin(1.0))
    chex.assert_trees_all_close(xform.jvp(jax.grad(jnp.sin), (1.0,), (1.0,))[1], -jnp.sin(1.0))


@jax.custom_jvp
def _cube(x):
    return x**3


@_cube.defjvp
def _(primals, tangents):
    # A user's rule may call JAX's AD.
    return jax.jvp(lambda x: x**3, primals, tangents)


@pytest.mark.parametrize(
    "f",
    [jnp.sin, jnp.tanh, _cube, jax.nn.relu, jax.jit(lambda x: jnp.sin(x) ** 2),
     jax.checkpoint(lambda x: jnp.sin(x) ** 2),
     lambda x: lax.scan(lambda c, _: (jnp.sin(c * x), c), x, None, length=3)[0],
     lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x),
     lambda x: jnp.linalg.solve(jnp.eye(2) + x, jnp.ones(2)).sum()],
    ids=["sin", "tanh", "custom_jvp", "relu", "jit", "remat", "scan", "cond", "solve"],
)  # fmt: skip
def test_jax_transforms_of_xform_transforms_are_allowed(f) -> None:
    want = jax.grad(jax.grad(f))(0.3)
    for second in (
        jax.grad(xform.grad(f)),
        jax.jit(jax.grad(xform.grad(f))),
        jax.jacfwd(jax.jit(xform.grad(f))),
        lambda x: jax.jvp(xform.grad(f), (x,), (1.0,))[1],
        lambda x: jax.linearize(xform.grad(f), x)[1](1.0),
        xform.grad(jax.grad(f)),
    ):
        chex.assert_trees_all_close(second(0.3), want, rtol=1e-4)
