"""The errors for budgets that no plan fits. They say what takes the bytes and what to do.

Each function takes a *Schedule*: which values of the forward pass are saved for the backward pass,
and which equations are recomputed.
"""

from __future__ import annotations

from xform.errors import BudgetInfeasible
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Schedule
from xform.planner.costs.outcome import saved_bytes
from xform.planner.report.residuals import Residual, residuals_of
from xform.policies import Budget
from xform.program.ir import has_auto_axes
from xform.terminal.text import human_bytes


def over_budget(smallest: Schedule, budget: Budget, least: int) -> BudgetInfeasible:
    """Return the error for a budget of the saved bytes.

    `smallest` is the Schedule that saves the fewest bytes, and `least` these bytes.
    """
    rows = largest_values(smallest)
    return BudgetInfeasible(
        f"policy={budget!r}",
        f"the smallest plan saves {human_bytes(least)}: {'; '.join(rows)}",
        rows[0].rpartition(" at ")[2] if rows else "",
        "raise the budget, make the batch or the sequence smaller, or apply xform.remat to the "
        "functions that compute these values",
        least,
    )


def largest_values(schedule: Schedule) -> list[str]:
    """Describe the three largest values that a Schedule saves: type, operation and source line."""
    rows = residuals_of(schedule, [""] * len(schedule.joint.inputs), "")
    return [_describe(r) for r in rows if r.trip_bytes and r.kind != "argument"][:3]


def _describe(row: Residual) -> str:
    """Describe one saved value: type, iterations, operation and source line."""
    trips = f" x {row.trips}" if row.trips > 1 else ""
    return f"{row.type}{trips} of {row.operation} at {row.where}"


def infeasible(
    budget: Budget, smallest: Schedule, least: int, measured_by: str, outside_bytes: int
) -> BudgetInfeasible:
    """Return the error for a budget of the peak.

    Args:
      budget: the budget.
      smallest: the Schedule with the lowest peak.
      least: the bytes of that peak.
      measured_by: how the peak was measured, for the message: "simulated", for example.
      outside_bytes: how many of these bytes are outside the derivative.
    """
    joint, rows = smallest.joint, largest_values(smallest)
    size = lambda atoms: human_bytes(sum(aval_bytes(v.aval) for v in atoms))
    saved = human_bytes(saved_bytes(smallest)) + (f" ({'; '.join(rows)})" if rows else "")
    found = human_bytes(least)
    if found == human_bytes(budget.bytes):
        found += f" ({least:,} bytes)"
    outside = f"{human_bytes(outside_bytes)} outside the derivative, " if outside_bytes > 0 else ""
    on_auto_axes = " (the peak is that of one device, and these parts are of all devices together)"
    return BudgetInfeasible(
        f"policy={budget!r}",
        f"the lowest peak found is {found} ({measured_by}): arguments "
        f"{size((*joint.inputs, *joint.seeds))}, outputs "
        f"{size((*joint.outputs, *joint.backward_outputs))}, saved values {saved}, {outside}"
        f"the rest temporary{on_auto_axes if has_auto_axes(joint.program) else ''}",
        rows[0].rpartition(" at ")[2] if rows else "",
        "raise the budget, donate arguments that are not read later, make the batch or the "
        "sequence smaller, shard the largest arguments, or offload saved values",
        least,
    )
