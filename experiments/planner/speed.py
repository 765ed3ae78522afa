"""How long it takes to plan for a budget of the peak, without compiling anything."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import scipy.optimize

from experiments.bench_step.run import transformer
from experiments.report import write_table
from xform.cost import flops
from xform.errors import BudgetInfeasible
from xform.interpret.joint import analyze
from xform.planner.costs.outcome import recompute_flops
from xform.planner.planned import within_peak
from xform.planner.simulate.liveness import liveness
from xform.policies import Budget, min_cut
from xform.transforms.inspect import At, point

HERE = Path(__file__).parent
TIMES = 3
HEAD = ["program", "equations", "budget, of the default", "CPU seconds: default", "budget",
        "work again, of forward's"]  # fmt: skip
CASES = {
    "8 transformer layers, unrolled": lambda: transformer(False, None, depth=8),
    "24 transformer layers, unrolled": lambda: transformer(False, None, depth=24),
    "48 transformer layers, unrolled": lambda: transformer(False, None, depth=48),
    "8 transformer layers, scanned": lambda: transformer(True, None, depth=8),
}


def measured(name: str, part: float) -> list[str]:
    """A row: planning for a part of what the default takes."""
    loss, args = CASES[name]()
    at: At = point("plan", loss, args, 0, False)
    start = time.process_time()
    joint = analyze(*at.ends)
    default = at.planned(min_cut)
    most = liveness(default.plan, "cpu").total_bytes
    planned = time.process_time()
    try:
        made = within_peak(*at.ends, Budget(int(part * most)))
        work = f"{recompute_flops(made.plan) / flops(at.function.program):.2f}"
    except BudgetInfeasible:
        work = "no plan takes so little"
    end = time.process_time()
    return [name, f"{len(joint.forward) + len(joint.backward):,}", f"{part:.0%}",
            f"{planned - start:.1f}", f"{end - planned:.1f}", work]  # fmt: skip


def best(name: str, part: float) -> list[str]:
    """The row of the least time of some, each in a process of its own, which keeps nothing."""
    command = [sys.executable, "-m", "experiments.planner.speed", name, "--part", str(part)]
    rows = [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        for _ in range(TIMES)
    ]
    return min((row.split("|") for row in rows), key=lambda row: float(row[4]))


def main() -> None:
    """Measure each case, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--part", type=float, help="of one case: this alone, once")
    options = parser.parse_args()
    if options.part:
        scipy.optimize.milp([1.0])  # imported once in a process
        print("|".join(measured(options.names[0], options.part)))
        return
    rows: list[list[str]] = []
    for name in options.names:
        for part in (0.8, 0.6):
            rows.append(best(name, part))
            print(rows[-1], flush=True)
    write_table(HERE, HEAD, rows, "speed")


if __name__ == "__main__":
    main()
