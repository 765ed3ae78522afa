"""How long it takes to plan for a budget of the peak, without compiling anything."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import scipy.optimize

from experiments.bench_step.run import transformer
from experiments.planner.size import body, chain, count
from experiments.report import write_table
from xform.errors import BudgetInfeasible
from xform.interpret.cost import flops
from xform.planner.costs.outcome import recompute_flops
from xform.planner.plan_program import plan_program
from xform.policies import Budget, min_cut
from xform.transforms.inspect import TracedDerivative, derivative_at

HERE = Path(__file__).parent
HEAD = ["program", "equations", "budget, of the default", "CPU seconds: default", "budget",
        "work again, of forward's"]  # fmt: skip
# Parts of the default; the last ones of a loop's body and of the chain are refused.
PARTS = {"a loop body of 10,000 operations": (0.8, 0.1), "a chain of 100,000 equations": (0.8,)}
CASES: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "8 transformer layers, unrolled": lambda: transformer(False, None, depth=8),
    "24 transformer layers, unrolled": lambda: transformer(False, None, depth=24),
    "48 transformer layers, unrolled": lambda: transformer(False, None, depth=48),
    "8 transformer layers, scanned": lambda: transformer(True, None, depth=8),
    "a loop body of 10,000 operations": lambda: (body(10_000), (jnp.ones(4096),)),
    "a chain of 100,000 equations": lambda: (chain(40_000), (jnp.ones(4096),)),
}


def measured(name: str, part: float) -> list[str]:
    """A row: planning for a part of what the default takes."""
    loss, args = CASES[name]()
    at: TracedDerivative = derivative_at("plan", loss, args, 0, False)
    start = time.process_time()
    joint = at.problem.joint()
    most = at.problem.peak(at.planned(min_cut).schedule)
    middle = time.process_time()
    try:
        made = plan_program(at.problem, Budget(int(part * most)))
        work = f"{recompute_flops(made.schedule) / flops(at.function.program):.2f}"
    except BudgetInfeasible:
        work = "refused: no plan takes so little"
    end = time.process_time()
    return [name, f"{count(joint):,}", f"{part:.0%}",
            f"{middle - start:.1f}", f"{end - middle:.1f}", work]  # fmt: skip


def best(name: str, part: float, times: int) -> list[str]:
    """The row of the least time of some, each in a process of its own, which keeps nothing."""
    command = [sys.executable, "-m", "experiments.planner.speed", name, "--part", str(part)]
    rows = [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        for _ in range(times)
    ]
    return min((row.split("|") for row in rows), key=lambda row: float(row[4]))


def main() -> None:
    """Measure each case, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--part", type=float, help="of one case: this alone, once")
    parser.add_argument("--times", type=int, default=3, help="of which the best is taken")
    options = parser.parse_args()
    if options.part:
        scipy.optimize.milp([1.0])  # imported once in a process
        print("|".join(measured(options.names[0], options.part)))
        return
    rows: list[list[str]] = []
    for name in options.names:
        for part in PARTS.get(name, (0.8, 0.6)):
            rows.append(best(name, part, options.times))
            print(rows[-1], flush=True)
    write_table(HERE, HEAD, rows, "speed")


if __name__ == "__main__":
    main()
