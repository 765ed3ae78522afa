"""The errors of budgets that no plan fits: what takes the bytes, and what to do."""

from __future__ import annotations

from xform.cost import aval_bytes
from xform.errors import BudgetInfeasible
from xform.interpret.joint import Schedule
from xform.planner.costs.outcome import kept_bytes
from xform.planner.report.residuals import Residual, residuals_of
from xform.policies import Budget
from xform.text import human_bytes


def over_budget(floor: Schedule, budget: Budget, least: int) -> BudgetInfeasible:
    """The error for a budget below the `least` that can be saved."""
    rows = floor_rows(floor)
    return BudgetInfeasible(
        f"policy={budget!r}",
        f"the plan that saves least saves {human_bytes(least)}: {'; '.join(rows)}",
        rows[0].rpartition(" at ")[2] if rows else "",
        "raise the budget, make the batch or the sequence smaller, or mark with xform.remat what "
        "holds these values",
        least,
    )


def floor_rows(floor: Schedule) -> list[str]:
    """The three largest values that a Schedule keeps."""
    rows = residuals_of(floor, [""] * len(floor.joint.inputs), "")
    return [_said(r) for r in rows if r.trip_bytes and r.kind != "argument"][:3]


def _said(row: Residual) -> str:
    trips = f" x {row.trips}" if row.trips > 1 else ""
    return f"{row.type}{trips} of {row.operation} at {row.where}"


def infeasible(
    budget: Budget, floor: Schedule, least: int, by: str, beside: int
) -> BudgetInfeasible:
    """The error for a budget below the lowest peak, of which some bytes may be `beside` it all."""
    joint, rows = floor.joint, floor_rows(floor)
    size = lambda atoms: human_bytes(sum(aval_bytes(v.aval) for v in atoms))
    saved = human_bytes(kept_bytes(floor)) + (f" ({'; '.join(rows)})" if rows else "")
    others = f"{human_bytes(beside)} beside the derivative, " if beside > 0 else ""
    return BudgetInfeasible(
        f"policy={budget!r}",
        f"the lowest peak found takes {human_bytes(least)} ({by}): arguments "
        f"{size((*joint.inputs, *joint.seeds))}, outputs "
        f"{size((*joint.outputs, *joint.backward_outputs))}, saved {saved}, {others}"
        "the rest in work",
        rows[0].rpartition(" at ")[2] if rows else "",
        "raise the budget, donate arguments that are not read later, make the batch or the "
        "sequence smaller, shard the largest arguments, or offload what is saved",
        least,
    )
