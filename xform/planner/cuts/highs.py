"""Build mixed-integer linear programs, and solve them by HiGHS through `scipy.optimize.milp`.

A `Model` chooses which values of a derivative are saved, recomputed or offloaded to the host: its
variables have bytes, FLOPs and seconds, and `solve` minimizes a cost within limits of bytes and
seconds. `integer_program.py` builds the models.

The search is limited by a number of branch-and-bound nodes, not by time, so a program has the same
solution on every machine. The solver does not react to Ctrl-C. So it runs in a thread of its own,
and the thread that waits for it reacts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are first used

from xform.errors import NotSolved

# A solution is accepted if its cost exceeds the proven lower bound by at most this fraction: _GAP
# for programs of fewer than _SMALL columns, which are solved fast anyway, _LARGE_GAP for others.
_GAP, _SMALL, _LARGE_GAP = 1e-6, 1_000, 1e-2
# The default limit on branch-and-bound nodes.
NODE_LIMIT = 2_000
# Statuses of `scipy.optimize.milp`: optimal, and infeasible.
_OPTIMAL, _INFEASIBLE = 0, 2
_WAIT = 0.1  # seconds between two checks for Ctrl-C


class Model:
    """A mixed-integer program: columns (variables) from 0 to 1, and rows `0 <= sum of terms`.

    Attributes:
      cost, size, seconds, flops, upper, integer: for each column, the arguments of `column`.
      lower: for each column, its lower bound. It is 0, unless the user of the model changes it.
      rows: the row of each term.
      terms: the column and the coefficient of each term.
      count: the number of rows.
    """

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
          size: bytes on the device, which the budget limits.
          upper: upper bound of the column.
          seconds: time on the link to the host, which is limited too.
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
              node_limit: int = NODE_LIMIT) -> np.ndarray | None:  # fmt: skip
        """Return the value of each column in the solution of least cost; None if none was found.

        The solution is optimal up to a small gap, or the best that was found within `node_limit`
        nodes.

        Args:
          budget: the most bytes.
          cost: the cost of each column.
          seconds: the most time on the link to the host.
          exact: do not limit the nodes.
          node_limit: the most branch-and-bound nodes.

        Raises:
          NotSolved: `exact`, and HiGHS did not prove that the solution is optimal.
        """
        if not cost:
            return np.zeros(0)
        gap = _GAP if exact or len(cost) < _SMALL else _LARGE_GAP
        limit = {} if exact else {"node_limit": node_limit}
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

        It is the optimum of the relaxed program, whose columns need not be integers. `budget` and
        `seconds` are the limits as in `solve`.
        """
        if not self.flops:
            return 0.0
        solution = self._run(budget, self.flops, seconds, 0, {})
        return float(np.dot(solution.x, self.flops)) if solution.status == _OPTIMAL else None

    def _run(self, budget: float, cost: Sequence[float], seconds: float, integer: int,
             options: dict[str, Any]) -> Any:  # fmt: skip
        """Return SciPy's result. `integer` is 1 for the integer program, 0 for the relaxed one."""
        columns, values = [c for c, _ in self.terms], [a for _, a in self.terms]
        n = len(cost)
        optimize = scipy.optimize
        rows = scipy.sparse.coo_array((values, (self.rows, columns)), shape=(self.count, n)).tocsr()
        constraints = [optimize.LinearConstraint(rows, 0, np.inf)] if self.count else []
        for coefficients, limit in ((self.size, budget), (self.seconds, seconds)):
            weights = np.asarray(coefficients)
            if weights.any() and limit < math.inf:
                scale = weights.max()
                row = weights[None] / scale
                constraints.append(optimize.LinearConstraint(row, -np.inf, limit / scale))
        bounds: Any = self.lower, self.upper
        return _interruptible(lambda: optimize.milp(
            np.asarray(cost) / max(*cost, 1.0),
            integrality=integer * np.asarray(self.integer),
            bounds=optimize.Bounds(*bounds),
            constraints=constraints,
            options=options,
        ))  # fmt: skip


def _interruptible(run: Any) -> Any:
    """Return `run()`, called in a thread. Ctrl-C ends the wait for a `run` that does not react.

    An exception in `run` is raised here.
    """
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
