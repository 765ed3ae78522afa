"""Check that a function is linear: its backward part reads no value of the active inputs."""

from __future__ import annotations

import itertools

from xform._jax import JaxprEqn, Var
from xform.errors import NotLinear
from xform.interpret.barrier import barrier_p
from xform.interpret.joint import Schedule, reads_of
from xform.interpret.node import fork_p, join_p
from xform.passes.dce import live
from xform.program.arithmetic import differentiable
from xform.program.ir import Mask
from xform.program.source import frame
from xform.registry.table import lookup


def check_linear(schedule: Schedule, active: Mask) -> None:
    """Raise NotLinear if the transpose would need the point at which it is taken.

    Also raise it if an output depends on an input only through a step function (rounding,
    comparison). The derivative of such an output is zero, and zero is not its transpose.
    """
    joint = schedule.joint
    moving = {v for v, on in zip(joint.inputs, active, strict=True) if on}
    smooth = set(moving)
    needed = set(map(id, live(joint.forward, joint.outputs)))
    for eqn in joint.forward:
        moves = [isinstance(v, Var) and v in moving for v in eqn.invars]
        # The outputs of a barrier wait for its other arguments, but do not depend on their values.
        waits = eqn.primitive is barrier_p
        moved = list(itertools.compress(eqn.outvars, moves)) if waits else eqn.outvars
        if not any(moves) or not moved:
            continue
        moving.update(moved)
        on = tuple(isinstance(v, Var) and v in smooth for v in eqn.invars)
        if eqn.primitive is fork_p:
            node = eqn.params["node"]
            if node.iterations_depend_on(tuple(moves)):
                raise _not_linear("an argument decides how many steps a loop takes", eqn)
            for inner in schedule.inner[node]:
                check_linear(inner, inner.joint.active)
            outs = (*lookup(node.eqn).active(node.eqn, on), False)
        else:
            outs = lookup(eqn).active(eqn, on)
        smooth.update(v for v, o in zip(eqn.outvars, outs, strict=True) if o)
        if id(eqn) in needed and not any(outs) and any(map(_inexact, eqn.outvars)):
            raise _not_linear(f"{eqn.primitive.name} is constant between its steps", eqn)
    forward = set(map(id, joint.forward))
    for eqn in schedule.order:
        for v in () if id(eqn) in forward else reads_of(eqn, schedule.inner):
            token = eqn.primitive is join_p and v is eqn.invars[0]
            if v in moving and not token:
                name = eqn.primitive.name
                raise _not_linear(f"the transpose of {name} needs the value of an argument", eqn)


def _inexact(v: Var) -> bool:
    return differentiable(v.aval)


def _not_linear(why: str, eqn: JaxprEqn) -> NotLinear:
    """Return the error for a function that is not linear at an equation."""
    return NotLinear(
        "linear_transpose",
        f"the function is not linear: {why}",
        frame(eqn),
        "use vjp, which transposes the derivative at a point",
    )
