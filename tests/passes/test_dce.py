"""The equations that are needed to compute some values."""

import jax.numpy as jnp

from xform.passes.dce import live
from xform.program.ir import trace


def test_known_values_need_no_equations() -> None:
    prog = trace(lambda x, y: [jnp.tanh(jnp.cos(jnp.sin(x)) * jnp.exp(y))], 1.0, 2.0)
    sin, cos, exp, product, tanh = prog.equations
    assert live(prog.equations, prog.outputs) == prog.equations
    known = {cos.outvars[0]}
    assert live(prog.equations, prog.outputs, known) == (exp, product, tanh)
    assert live(prog.equations, sin.outvars, known) == (sin,)
    assert live(prog.equations, cos.outvars, known) == ()
