"""Mixed-integer linear programs, solved by HiGHS through `scipy.optimize.milp`.

The search is limited in branch-and-bound nodes, not in time, so a program has the same solution on
every machine. The solver runs in a thread of its own, because it does not react to Ctrl-C. The
thread that waits for it does.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are first used

from xform.errors import NotSolved

# A solution is accepted if its relative gap to the bound is at most this. The gap is practically 0
# for programs of fewer than `_SMALL` columns, which are solved fast anyway.
_GAP, _SMALL, _LARGE_GAP = 1e-6, 1_000, 1e-2
# The most branch-and-bound nodes.
BRANCHES = 2_000
# Statuses of `scipy.optimize.milp`: optimal, and infeasible.
_OPTIMAL, _INFEASIBLE = 0, 2
_WAIT = 0.1  # seconds between two checks for Ctrl-C


class Model:
    """A mixed-integer program: columns (variables) from 0 to 1, and rows `0 <= sum of terms`."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.flops: list[float] = []
        self.size: list[float] = []
        self.seconds: list[float] = []
        self.upper: list[float] = []
        self.lower: list[float] = []
        self.integer: list[int] = []
        self.rows: list[int] = []
        self.terms: list[tuple[int, float]] = []
        self.count = 0

    def column(self, cost: float = 0.0, size: float = 0.0, upper: float = 1.0,
               seconds: float = 0.0, flops: float = 0.0, integer: bool = True) -> int:  # fmt: skip
        """Add a column, and return its number.

        Args:
          cost: coefficient in the cost.
          size: bytes on the device, for the budget.
          upper: upper bound of the column.
          seconds: time on the link to the host.
          flops: FLOPs of recomputed work. The cost includes them already.
          integer: whether the column is an integer; else it may be any number from 0 to `upper`.
        """
        self.cost.append(cost)
        self.flops.append(flops)
        self.size.append(size)
        self.seconds.append(seconds)
        self.upper.append(upper)
        self.lower.append(0.0)
        self.integer.append(int(integer))
        return len(self.cost) - 1

    def row(self, *terms: tuple[int, float]) -> None:
        """Add the constraint that a sum of (column, coefficient) terms is at least 0."""
        self.rows += [self.count] * len(terms)
        self.terms += terms
        self.count += 1

    def solve(self, budget: float, cost: Sequence[float], seconds: float, exact: bool = False,
              branches: int = BRANCHES) -> np.ndarray | None:  # fmt: skip
        """Return the columns with the least `cost` within `budget` bytes and `seconds` on the link.

        The solution is optimal up to a small gap, or the best that was found within `branches`
        nodes. None: no solution was found. With `exact` the number of nodes is unlimited, and a
        solution that is not proven optimal raises `NotSolved`.
        """
        if not cost:
            return np.zeros(0)
        gap = _GAP if exact or len(cost) < _SMALL else _LARGE_GAP
        limit = {} if exact else {"node_limit": branches}
        solution = self._run(budget, cost, seconds, 1, {"mip_rel_gap": gap, **limit})
        if exact and solution.status not in (_OPTIMAL, _INFEASIBLE):
            raise NotSolved(
                "a budget with solver='exact'",
                f"HiGHS stopped without a proof that its plan is the best: {solution.message}",
                "",
                "use solver='auto', which takes the best plan that HiGHS finds",
            )
        return solution.x

    def bound(self, budget: float, seconds: float) -> float | None:
        """Return a lower bound on the FLOPs of any solution; None if there is no solution.

        It is the optimum of the relaxed program, whose columns need not be integers.
        """
        if not self.flops:
            return 0.0
        solution = self._run(budget, self.flops, seconds, 0, {})
        return float(np.dot(solution.x, self.flops)) if solution.status == _OPTIMAL else None

    def _run(self, budget: float, cost: Sequence[float], seconds: float, integer: int,
             options: dict[str, Any]) -> Any:  # fmt: skip
        columns, values = [c for c, _ in self.terms], [a for _, a in self.terms]
        n = len(cost)
        optimize = scipy.optimize
        rows = scipy.sparse.coo_array((values, (self.rows, columns)), shape=(self.count, n)).tocsr()
        constraints = [optimize.LinearConstraint(rows, 0, np.inf)] if self.count else []
        for amounts, limit in ((self.size, budget), (self.seconds, seconds)):
            weights = np.asarray(amounts)
            if weights.any() and limit < math.inf:
                scale = weights.max()
                row = weights[None] / scale
                constraints.append(optimize.LinearConstraint(row, -np.inf, limit / scale))
        limits: Any = self.lower, self.upper
        return _interruptible(lambda: optimize.milp(
            np.asarray(cost) / max(*cost, 1.0),
            integrality=integer * np.asarray(self.integer),
            bounds=optimize.Bounds(*limits),
            constraints=constraints,
            options=options,
        ))  # fmt: skip


def _interruptible(run: Any) -> Any:
    """Call a function that does not react to Ctrl-C, so that Ctrl-C ends the wait for it."""
    outcomes: list[Any] = []

    def work() -> None:
        try:
            outcomes.append((run(), None))
        except BaseException as error:
            outcomes.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_WAIT)
    result, error = outcomes[0]
    if error is not None:
        raise error
    return result
