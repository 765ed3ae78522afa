"""Check that a function is linear, for `linear_transpose`.

The transpose of a linear function is its pullback, which is the same at every point. So the check
looks at the Joint of the function, which is its forward and its backward part as one program. No
equation of the backward part may read a value that depends on an active input. The active inputs
are those that the function is linear in.
"""

from __future__ import annotations

import itertools

from xform._jax import JaxprEqn, Var
from xform.errors import NotLinear
from xform.interpret.joint import Schedule, reads_of
from xform.interpret.node import fork_p, join_p
from xform.passes.dce import live
from xform.program.arithmetic import differentiable
from xform.program.ir import Mask
from xform.program.source import frame
from xform.registry.table import lookup
from xform.steering.barrier import barrier_p


def check_linear(schedule: Schedule, active: Mask) -> None:
    """Raise NotLinear if the backward part reads a value that depends on an active input.

    Also raise it if an output depends on an active input only through a step function (rounding,
    comparison). The derivative of such an output is zero, and would be a wrong transpose.

    `schedule` is the Schedule of the function's Joint, and `active` says which inputs are active.
    """
    joint = schedule.joint
    dependent = {v for v, on in zip(joint.inputs, active, strict=True) if on}
    differentiably_dependent = set(dependent)
    needed = set(map(id, live(joint.forward, joint.outputs)))
    for eqn in joint.forward:
        on = [isinstance(v, Var) and v in dependent for v in eqn.invars]
        # The outputs of a barrier wait for its other arguments, but do not depend on their values.
        is_barrier = eqn.primitive is barrier_p
        results = list(itertools.compress(eqn.outvars, on)) if is_barrier else eqn.outvars
        if not any(on) or not results:
            continue
        dependent.update(results)
        active_in = tuple(isinstance(v, Var) and v in differentiably_dependent for v in eqn.invars)
        if eqn.primitive is fork_p:  # the forward part of a loop, branch or call
            node = eqn.params["node"]
            if node.iterations_depend_on(tuple(on)):
                raise _not_linear("an argument decides how many iterations a loop runs", eqn)
            for inner in schedule.inner[node]:
                check_linear(inner, inner.joint.active)
            active_out = (*lookup(node.eqn).active(node.eqn, active_in), False)  # no token
        else:
            active_out = lookup(eqn).active(eqn, active_in)
        differentiably_dependent.update(itertools.compress(eqn.outvars, active_out))
        has_float = any(differentiable(v.aval) for v in eqn.outvars)
        if id(eqn) in needed and not any(active_out) and has_float:
            raise _not_linear(f"{eqn.primitive.name} is piecewise constant", eqn)
    forward = set(map(id, joint.forward))
    for eqn in schedule.order:
        for v in () if id(eqn) in forward else reads_of(eqn, schedule.inner):
            # The token of a fork depends on active inputs; the nested Schedules were checked above.
            is_token = eqn.primitive is join_p and v is eqn.invars[0]
            if v in dependent and not is_token:
                name = eqn.primitive.name
                raise _not_linear(f"the transpose of {name} needs the value of an argument", eqn)


def _not_linear(why: str, eqn: JaxprEqn) -> NotLinear:
    """Return the error for a function that is not linear at an equation."""
    return NotLinear(
        "linear_transpose",
        f"the function is not linear: {why}",
        frame(eqn),
        "use vjp, which transposes the derivative at a point",
    )
