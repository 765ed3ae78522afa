"""Open calls, so that the equations in their bodies can be sliced."""

from __future__ import annotations

from xform._jax import JaxprEqn
from xform.passes.dce import live
from xform.passes.inline import inline_bodies
from xform.passes.structured import called_body, has_shardings, is_remat_region, plain_call_body
from xform.program.ir import Program


def opened(prog: Program) -> Program:
    """Return a program with its calls of jitted functions and its remat regions inlined.

    The loop over slices recomputes its body in a backward pass, so remat regions in it need no
    policy of their own. Calls with shardings stay, and functions with custom derivative rules.
    Equations that no output depends on are dropped: a region would keep whole values for them. The
    result is cached on the program.
    """
    if "opened" not in prog.cache:
        inlined = inline_bodies(prog, _body)
        equations = live(inlined.equations, inlined.outputs)
        prog.cache["opened"] = Program(inlined.inputs, inlined.consts, equations, inlined.outputs)
    return prog.cache["opened"]


def _body(eqn: JaxprEqn) -> Program | None:
    """Return the body of a call that is opened; None for any other equation."""
    if is_remat_region(eqn):
        return called_body(eqn)
    return None if has_shardings(eqn) else plain_call_body(eqn)
