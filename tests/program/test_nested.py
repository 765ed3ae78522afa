"""Equations in nested jaxprs are mapped too."""

import jax
import jax.numpy as jnp
from jax import lax

from xform.program.nested import map_equations


def nested(x):
    """Call `sin` in a jitted function, a branch, a region and a loop."""
    step = jax.checkpoint(lambda x: jax.jit(jnp.sin)(x))
    x = lax.scan(lambda x, _: (step(x), None), x, None, length=2)[0]
    return lax.cond(x > 0, jnp.sin, jnp.cos, x)


def to_cos(eqn):
    return eqn.replace(primitive=lax.cos_p) if eqn.primitive is lax.sin_p else eqn


def test_all_equations_are_mapped() -> None:
    jaxpr = jax.make_jaxpr(nested)(1.0)
    assert "sin" in str(jaxpr)
    mapped = map_equations(jaxpr, to_cos)
    assert not [line for line in str(mapped).splitlines() if " = sin[" in line]
    assert str(mapped).count("cos[") == str(jaxpr).count("sin[") + str(jaxpr).count("cos[")


def test_an_unchanged_jaxpr_is_returned_itself() -> None:
    jaxpr = jax.make_jaxpr(nested)(1.0)
    assert map_equations(jaxpr, lambda eqn: eqn) is jaxpr
