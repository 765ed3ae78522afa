"""The activity of a value: whether derivatives with respect to the inputs pass through it.

It corresponds to `requires_grad` of a PyTorch tensor. An "active" value depends differentiably on
an active input. A "stopped" value is computed from active values, but no derivative passes
(`stop_gradient`, integers, comparisons). A "constant" value depends on no active input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from xform._jax import JaxprEqn, Var, cond_p, scan_counts, scan_p, while_p
from xform.errors import MissingRule, UnsupportedParam
from xform.passes.listing import programs
from xform.program.arithmetic import differentiable
from xform.program.ir import Program
from xform.registry.table import lookup

Activity = Literal["constant", "stopped", "active"]
ACTIVITIES: tuple[Activity, ...] = ("constant", "stopped", "active")
Activities = dict[Var, Activity]


def strongest(activities: Sequence[Activity]) -> Activity:
    """Return "active" if one of the activities is, else "stopped" if one is, else "constant"."""
    return ACTIVITIES[max(map(ACTIVITIES.index, activities), default=0)]


def activity_of(atom: Any, activities: Activities) -> Activity:
    """Return the activity of a variable; a literal is constant."""
    return activities.get(atom, "constant") if isinstance(atom, Var) else "constant"


def activities(prog: Program, inputs: Sequence[Activity]) -> Activities:
    """Return the activity of each value of a program, including its loops, branches and calls."""
    known: Activities = {}
    output_activities(prog, inputs, known)
    return known


def output_activities(
    prog: Program, inputs: Sequence[Activity], known: Activities
) -> list[Activity]:
    """Return the activities of the outputs, and record the activities of all values in `known`.

    If a program runs several times, `known` holds the strongest activity of each value.
    """
    local: Activities = dict(zip(prog.inputs, inputs, strict=True))
    for eqn in prog.equations:
        results = equation_activities(eqn, [activity_of(v, local) for v in eqn.invars], known)
        local.update(zip(eqn.outvars, results, strict=True))
    known.update({v: strongest([activity_of(v, known), activity]) for v, activity in local.items()})
    return [activity_of(v, local) for v in prog.outputs]


def equation_activities(
    eqn: JaxprEqn, inputs: Sequence[Activity], known: Activities
) -> list[Activity]:
    """Return the activities of an equation's outputs.

    A primitive without a rule is assumed to be differentiable in all its inputs.
    """
    by_inputs = _of_nested_programs(eqn, inputs, known) or [strongest(inputs)] * len(eqn.outvars)
    pairs = zip(_differentiable_outputs(eqn, inputs, by_inputs), by_inputs, strict=True)
    return [
        "active" if passes else "stopped" if activity != "constant" else "constant"
        for passes, activity in pairs
    ]


def _differentiable_outputs(eqn: JaxprEqn, inputs: Sequence[Activity],
                            by_inputs: Sequence[Activity]) -> Sequence[bool]:  # fmt: skip
    """Return, for each output, whether it depends differentiably on an active input.

    `by_inputs` holds the activities that the outputs would have if this operation, as a whole, were
    differentiable. It is the answer for an operation whose rule does not tell.
    """
    active = tuple(activity == "active" for activity in inputs)
    if not any(active):
        return (False,) * len(eqn.outvars)
    try:
        return lookup(eqn).active(eqn, active)
    except (MissingRule, UnsupportedParam):
        pairs = zip(eqn.outvars, by_inputs, strict=True)
        return [activity == "active" and differentiable(v.aval) for v, activity in pairs]


def _of_nested_programs(
    eqn: JaxprEqn, inputs: Sequence[Activity], known: Activities
) -> list[Activity]:
    """Return the activities of an equation's outputs, computed from the programs inside it.

    Returns an empty list for an equation without programs inside it, or if their inputs and outputs
    do not match those of the equation.
    """
    bodies = [prog for _, prog in programs(eqn)]
    if eqn.primitive is scan_p:
        consts, carries = scan_counts(eqn.params)
        first_scanned = consts + carries
        return _of_loop(bodies[0], inputs[:consts], inputs[consts:first_scanned],
                        inputs[first_scanned:], known)  # fmt: skip
    if eqn.primitive is while_p:
        a = eqn.params[
            "cond_nconsts"
        ]  # the operands: constants of the condition, of the body, carry
        b = a + eqn.params["body_nconsts"]
        condition, body = bodies
        carry = _of_loop(body, inputs[a:b], inputs[b:], (), known)
        (predicate,) = output_activities(condition, [*inputs[:a], *carry], known)
        return [_controlled(predicate, activity) for activity in carry]
    if eqn.primitive is cond_p:
        index, operands = inputs[0], inputs[1:]
        results = [output_activities(branch, operands, known) for branch in bodies]
        return [_controlled(index, strongest(output)) for output in zip(*results, strict=True)]
    if len(bodies) == 1 and len(bodies[0].inputs) == len(eqn.invars):
        outs = output_activities(bodies[0], inputs, known)
        return outs if len(outs) == len(eqn.outvars) else []
    return []


def _controlled(predicate: Activity, result: Activity) -> Activity:
    """Return "stopped" for a constant result of control flow that depends on an active input."""
    return "stopped" if result == "constant" and predicate != "constant" else result


def _of_loop(body: Program, consts: Sequence[Activity], carry: Sequence[Activity],
             scanned: Sequence[Activity], known: Activities) -> list[Activity]:  # fmt: skip
    """Return the activities of a loop's outputs, given those of its operands.

    The activity of a carry is its strongest activity over all iterations.
    """
    n = len(carry)
    while True:
        outs = output_activities(body, [*consts, *carry, *scanned], known)
        merged: list[Activity] = [strongest(pair) for pair in zip(carry, outs[:n], strict=True)]
        if merged == list(carry):
            return [*merged, *outs[n:]]
        carry = merged
