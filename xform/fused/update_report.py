"""The answer to the question where a step updates each parameter."""

from __future__ import annotations

import dataclasses
from typing import Literal

from xform.fused.fused_step import Step
from xform.fused.update_plan import UpdatePlan
from xform.interpret.cost import aval_bytes
from xform.program.dimensions import shape
from xform.terminal.notebook import Result
from xform.terminal.text import columns, human_bytes

Place = Literal["backward loop", "after the backward loop", "backward pass"]


@dataclasses.dataclass(frozen=True)
class UpdateRow:
    """Where one parameter is updated.

    Attributes:
      name: the path of the parameter in its pytree.
      place: "backward loop": layer by layer, in the loop that computes the gradient. "after the
        backward loop": when the gradient of all layers is complete. "backward pass": as soon as the
        gradient of this parameter is complete.
      gradient_bytes: the largest part of the gradient that exists at one time, in bytes.
      reason: why the parameter of scanned layers is not updated in the loop; else "".
    """

    name: str
    place: Place
    gradient_bytes: int
    reason: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class UpdateReport(Result):
    """Where a step updates its parameters; its text is a table.

    Attributes:
      rows: one row for each parameter.
    """

    rows: tuple[UpdateRow, ...]

    def heading(self) -> str:
        """Return the number of parameters, and the largest part of their gradient at one time."""
        n, most = len(self.rows), max((r.gradient_bytes for r in self.rows), default=0)
        return (f"{n} parameter{'s' * (n != 1)}, "
                f"at most {human_bytes(most)} of the gradient of each at one time")  # fmt: skip

    def __str__(self) -> str:
        cells = [(r.name, r.place, human_bytes(r.gradient_bytes), r.reason) for r in self.rows]
        heads = ("parameter", "updated in", "gradient at one time", "why not in the loop")
        return columns([heads, *cells], right=[2])


def report(step: Step, plan: UpdatePlan) -> UpdateReport:
    """Return where a step updates each parameter."""
    layers = {u.leaf: u.targets for loop in plan.loops for u in loop.updates}
    rows: list[UpdateRow] = []
    for leaf, (name, v) in enumerate(zip(step.names, step.params, strict=True)):
        n, reason = aval_bytes(v.aval), plan.reasons.get(leaf, "")
        place: Place = "backward pass"
        if leaf in layers:
            place, n = "backward loop", n // shape(v)[layers[leaf][0].axis]
        elif reason:
            place = "after the backward loop"
        rows.append(UpdateRow(name, place, n, reason))
    return UpdateReport(tuple(rows))
