"""Budgets of the peak, from what the default takes down to the floor: kept, and at what work."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np

import xform
from experiments.planner.zoo import ZOO
from experiments.report import write_table

HERE = Path(__file__).parent
HEAD = ["model", "default MiB", "floor MiB", "points", "kept", "most compiles", "bytes fall",
        "work grows", "work again at the floor"]  # fmt: skip
MIB = 2**20


def sweep(name: str, points: int) -> list[str]:
    """One model: plan for each of so many budgets."""
    loss, args = ZOO[name]()
    most = xform.plan(loss, *args).compiled_bytes
    assert most is not None
    floor = lowest(name, most)
    rows: list[xform.Plan] = []
    kept = 0
    for budget in np.linspace(most, floor, points).astype(int):
        try:
            made = xform.plan(loss, *args, policy=xform.policies.budget(int(budget)))
        except xform.errors.BudgetInfeasible as error:
            print(f"  {name}: {budget / MIB:.1f} MiB refused, floor {error.floor_bytes / MIB:.1f}")
            continue
        assert made.compiled_bytes is not None
        kept += made.compiled_bytes <= budget
        rows.append(made)
        print(
            f"  {name}: {budget / MIB:.1f} MiB: {made.compiled_bytes / MIB:.1f} compiled, "
            f"{made.predicted_bytes / MIB:.1f} predicted, {made.recompute_flops / 1e9:.2f} GFLOP, "
            f"{made.compiles} compiled", flush=True,
        )  # fmt: skip
    compiled = [p.compiled_bytes or 0 for p in rows]
    work = [p.recompute_flops for p in rows]
    return [
        name,
        f"{most / MIB:.1f}",
        f"{floor / MIB:.1f}",
        str(points),
        f"{kept}",
        str(max(p.compiles for p in rows)),
        "yes" if all(b <= a for a, b in itertools.pairwise(compiled)) else "no",
        "yes" if all(b >= a for a, b in itertools.pairwise(work)) else "no",
        f"{work[-1] / rows[-1].forward_flops:.2f} of forward",
    ]


def lowest(name: str, most: int) -> int:
    """The lowest peak that a plan was found for, by the compiler."""
    loss, args = ZOO[name]()
    try:
        xform.plan(loss, *args, policy=xform.policies.budget(1))
    except xform.errors.BudgetInfeasible as error:
        floor = error.floor_bytes
    else:
        return most
    # The simulation's floor is raised to what the compiler grants.
    while True:
        try:
            made = xform.plan(loss, *args, policy=xform.policies.budget(floor))
            return made.compiled_bytes or most
        except xform.errors.BudgetInfeasible as error:
            floor = max(error.floor_bytes, int(1.02 * floor))


def main() -> None:
    """Sweep each model and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("names", nargs="*", default=list(ZOO))
    options = parser.parse_args()
    rows: list[list[str]] = []
    for name in options.names:
        rows.append(sweep(name, options.points))
        write_table(HERE, HEAD, rows, "budgets")


if __name__ == "__main__":
    main()
