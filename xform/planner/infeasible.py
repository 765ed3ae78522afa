"""The errors for budgets that no plan fits. They say what takes the bytes and what to do.

Each function takes a *Schedule*: which values of the forward pass are saved for the backward pass,
and which equations are recomputed.
"""

from __future__ import annotations

from collections import Counter

from xform.errors import BudgetInfeasible
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Schedule
from xform.planner.costs.outcome import saved_bytes
from xform.planner.report.residuals import residuals_of
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
    """Describe the largest values that a Schedule saves, by three lines of the program at most.

    Each text has the type, the number of such values, the operation and the source line.
    """
    number, size = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for row in residuals_of(schedule, [""] * len(schedule.joint.inputs), ""):
        if row.trip_bytes and row.kind != "argument":
            key = row.type, row.operation, row.where
            number[key] += row.trips
            size[key] += row.total_bytes
    return [_described(key, number[key]) for key, _ in size.most_common(3)]


def _described(key: tuple[str, str, str], n: int) -> str:
    """Describe equal values: type, number, operation and source line."""
    kind, operation, where = key
    return f"{kind}{f' x {n}' if n > 1 else ''} of {operation} at {where}"


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
    on_auto_axes = (
        " (the peak is that of one device, and these parts are of all devices together)"
        if has_auto_axes(joint.program)
        else ""
    )
    slices_of_symbols = budget.slices and budget.symbolic
    unsliced = "; no axis of symbolic length is sliced" if slices_of_symbols else ""
    return BudgetInfeasible(
        f"policy={budget!r}",
        f"the lowest peak found is {found} ({measured_by}): arguments "
        f"{size((*joint.inputs, *joint.seeds))}, outputs "
        f"{size((*joint.outputs, *joint.backward_outputs))}, saved values {saved}, {outside}"
        f"the rest temporary{on_auto_axes}{unsliced}",
        rows[0].rpartition(" at ")[2] if rows else "",
        "raise the budget, donate arguments that are not read later, make the batch or the "
        "sequence smaller, shard the largest arguments, or offload saved values",
        least,
    )


def nothing_fits(budget: Budget, least: int, measured_by: str, remedy: str) -> BudgetInfeasible:
    """Return the error for a budget of the peak of a program without plans.

    `least` are the bytes of the lowest peak, which was measured as `measured_by` says.
    """
    return BudgetInfeasible(
        f"policy={budget!r}",
        f"the lowest peak found takes {human_bytes(least)} ({measured_by}): arguments, outputs and "
        "temporary memory",
        "",
        remedy,
        least,
    )
