"""The plans of the programs of `experiments/unmodified/reports`, in numbers.

python -m tests.planner.golden_plans    # after a change of plans on purpose; run it on both JAX

Nothing is compiled. `golden_plans.json` has the numbers for each minor version of JAX.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import jax

from experiments.unmodified.reports.run import REPORTS
from xform.errors import BudgetInfeasible
from xform.planner.candidate import Candidate
from xform.planner.costs.outcome import residual_bytes
from xform.planner.default_plan import default_plan
from xform.planner.device import planning_for
from xform.planner.plan_program import plan_program
from xform.planner.problem import Problem
from xform.planner.report.rows import rows_of
from xform.policies import Budget
from xform.slices.candidates import choices
from xform.slices.opened import opened
from xform.transforms.inspect import derivative_at

FILE = Path(__file__).parent / "golden_plans.json"
VERSION = ".".join(jax.__version__.split(".")[:2])
BACKENDS = ("cpu", "gpu", "tpu")
# A budget takes half a second for each program, so every sixth program has one.
WITH_BUDGET = list(REPORTS)[::6]


def numbers(name: str) -> dict[str, str]:
    """Return the plans of one program: by default for each backend, in slices, in a budget."""
    loss, args = REPORTS[name].make()
    found: dict[str, str] = {}
    for backend in BACKENDS:
        with planning_for(backend, None, backend):
            problem = derivative_at("plan", loss, args, 0, False).problem
            found[backend] = _plan(problem, default_plan(problem))
            if backend == "cpu":
                found["slices"] = _slices(problem)
                if name in WITH_BUDGET:
                    found["budget"] = _in_budget(problem)
    return found


def _plan(problem: Problem, candidate: Candidate) -> str:
    """Return a plan in numbers, with a digest of its rows."""
    schedule = candidate.schedule
    rows = rows_of(schedule)
    decisions = collections.Counter(row.decision for row in rows)
    texts = [f"{r.value} {r.decision} {r.type} {r.loops} {r.marginal_flops}" for r in rows]
    counts = ", ".join(f"{n} {decision}" for decision, n in sorted(decisions.items()))
    return (
        f"peak {problem.peak(schedule)}, saved {residual_bytes(schedule)}, {counts or 'no rows'}, "
        f"work {candidate.work}, {_digest(texts)}"
    )


def _slices(problem: Problem) -> str:
    """Return the first regions that may run in slices, with their numbers of slices."""
    regions = [
        f"{choice.fewest.start.aval.str_short()} axis {choice.fewest.axis} of "
        f"{len(choice.fewest.members)} equations in {[region.n for region in choice.regions]}"
        for choice in choices(opened(problem.program))[:2]
    ]
    return "; ".join(regions) or "none"


def _in_budget(problem: Problem) -> str:
    """Return the plan within four fifths of the default's peak, without a compiler."""
    limit = problem.peak(default_plan(problem).schedule) * 4 // 5
    try:
        return _plan(problem, plan_program(problem, Budget(limit, verify=False)))
    except BudgetInfeasible as error:
        return f"no plan below {error.floor_bytes}"


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


def main() -> None:
    """Write the numbers for the installed JAX."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    known[VERSION] = {name: numbers(name) for name in REPORTS}
    FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
