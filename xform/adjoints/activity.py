"""The activity of a value: whether derivatives with respect to the inputs pass through it.

It corresponds to `requires_grad` of a PyTorch tensor. An "active" value depends differentiably on
an active input. A "stopped" value is computed from active values, but no derivative passes
(`stop_gradient`, integers, comparisons). A "constant" value depends on no active input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from xform._jax import JaxprEqn, Var
from xform.errors import MissingRule, UnsupportedParam
from xform.passes.dataflow import Forward
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
    """Return the activity of each value of a program, including its loops, branches and calls.

    If a program runs several times, it is the strongest activity of the value.
    """
    find = _FindActivities()
    find.run(prog, inputs)
    return find.known


def equation_activities(eqn: JaxprEqn, inputs: Sequence[Activity]) -> Sequence[Activity]:
    """Return the activities of an equation's outputs, from those of its inputs."""
    return _FindActivities().equation(eqn, [*inputs])


class _FindActivities(Forward[Activity]):
    """Finds the activity of each value of a program. `known` has the strongest of each value."""

    follows_control = True

    def __init__(self):
        self.known: Activities = {}

    def constant(self, v: Any) -> Activity:
        return "constant"

    def join(self, a: Activity, b: Activity) -> Activity:
        return strongest([a, b])

    def control(self, predicate: Activity, x: Activity) -> Activity:
        """Return "stopped" for a constant that is chosen by a value that is not constant."""
        return "stopped" if x == "constant" and predicate != "constant" else x

    def environment(self, prog: Program, inputs: Sequence[Activity]) -> Activities:
        env = super().environment(prog, inputs)
        self.known.update((v, strongest([self.known.get(v, x), x])) for v, x in env.items())
        return env

    def transfer(self, eqn: JaxprEqn, operands: list[Activity], through: list[Activity] | None
                 ) -> list[Activity]:  # fmt: skip
        by_inputs: list[Activity] = through or [strongest(operands)] * len(eqn.outvars)
        pairs = zip(_differentiable_outputs(eqn, operands, by_inputs), by_inputs, strict=True)
        return [
            "active" if passes else "stopped" if activity != "constant" else "constant"
            for passes, activity in pairs
        ]


def _differentiable_outputs(eqn: JaxprEqn, inputs: Sequence[Activity],
                            by_inputs: Sequence[Activity]) -> Sequence[bool]:  # fmt: skip
    """Return, for each output, whether it depends differentiably on an active input.

    `by_inputs` holds the activities that the outputs would have if this operation, as a whole, were
    differentiable. It is the answer for an operation whose rule does not tell. A primitive without
    a rule is assumed to be differentiable in all its inputs.
    """
    active = tuple(activity == "active" for activity in inputs)
    if not any(active):
        return (False,) * len(eqn.outvars)
    try:
        return lookup(eqn).active(eqn, active)
    except (MissingRule, UnsupportedParam):
        pairs = zip(eqn.outvars, by_inputs, strict=True)
        return [activity == "active" and differentiable(v.aval) for v, activity in pairs]
