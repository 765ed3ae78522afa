"""Budgets of the peak that the simulation alone decides, as under `vmap`."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import jax
import numpy as np

import xform
from experiments.planner.zoo import ZOO
from experiments.report import write_table
from xform.memory.compilation import compile_for

HERE = Path(__file__).parent
HEAD = ["model", "default MiB", "floor MiB", "points", "plans", "kept", "over at worst",
        "error, median", "error, worst"]  # fmt: skip
MIB = 2**20
# A budget, and what its plan takes by the simulation and by the compiler.
Point = tuple[int, int, int]


def sweep(name: str, points: int, target: str | None) -> list[Point]:
    """One model: budgets from the default's bytes to the floor."""
    loss, args = ZOO[name]()
    default = xform.plan(loss, *args, target=target)
    assert default.compiled_bytes is not None
    compiled = {str(default.record): default.compiled_bytes}
    floor = lowest(name, target)
    found: list[Point] = []
    for budget in np.linspace(default.compiled_bytes, floor, points).astype(int):
        policy = xform.policies.budget(max(int(budget), floor), of="peak")
        made = xform.plan(loss, *args, policy=policy, target=target, verify=False)
        key = str(made.record)
        if key not in compiled:
            step = jax.jit(xform.value_and_grad(loss, policy=made))
            compiled[key] = compile_for(step, args, target=target).total_bytes or 0
        found.append((policy.bytes, made.predicted_bytes, compiled[key]))
        print(f"  {name}: " + ", ".join(f"{n / MIB:.1f}" for n in found[-1]), flush=True)
    return found


def lowest(name: str, target: str | None) -> int:
    """The lowest peak that the simulation finds."""
    loss, args = ZOO[name]()
    policy = xform.policies.budget(1, of="peak")
    try:
        return xform.plan(loss, *args, policy=policy, target=target, verify=False).predicted_bytes
    except xform.errors.BudgetInfeasible as error:
        return error.floor_bytes


def row(name: str, found: list[Point]) -> list[str]:
    """A line of the table; errors are those of the plans, of which several budgets may have one."""
    plans = {(p, c) for _, p, c in found}
    errors = [p / c - 1 for p, c in plans]
    over = max(c / b - 1 for b, _, c in found)
    return [
        name,
        "" if name == "all" else f"{found[0][0] / MIB:.1f}",
        "" if name == "all" else f"{found[-1][0] / MIB:.1f}",
        str(len(found)),
        str(len(plans)),
        str(sum(c <= b for b, _, c in found)),
        f"{max(0.0, over):.1%}",
        f"{statistics.median(map(abs, errors)):.1%}",
        f"{max(errors, key=abs):+.1%}",
    ]


def main() -> None:
    """Sweep each model and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--target", help="what to plan and compile for: JAX's default backend")
    parser.add_argument("names", nargs="*", default=list(ZOO))
    options = parser.parse_args()
    rows: list[list[str]] = []
    every: list[Point] = []
    for name in options.names:
        found = sweep(name, options.points, options.target)
        every += found
        rows.append(row(name, found))
        print(rows[-1], flush=True)
        mark = f"simulated-{options.target}" if options.target else "simulated"
        write_table(HERE, HEAD, [*rows, row("all", every)], mark, options.target)


if __name__ == "__main__":
    main()
