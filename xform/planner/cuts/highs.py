"""Linear programs with whole numbers, by HiGHS: `scipy.optimize.milp`.

They are limited in branches, not in time, so that one program has one solution on every machine.
They run in a thread of their own: the solver does not look for Ctrl-C, the thread that waits does.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are first used

from xform.errors import NotSolved

# A solution is good enough whose cost is this near to the bound: exact in a small program, where
# that costs nothing.
_GAP, _SMALL, _LARGE_GAP = 1e-6, 1_000, 1e-2
BRANCHES = 2_000
# `scipy.optimize.milp` says of a program that it was solved, or that it has no solution.
_SOLVED, _NONE = 0, 2
_WAIT = 0.1  # seconds between two looks for Ctrl-C


class Model:
    """Columns between 0 and 1, rows `0 <= sum of terms`."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.flops: list[float] = []
        self.size: list[float] = []
        self.seconds: list[float] = []
        self.upper: list[float] = []
        self.lower: list[float] = []
        self.whole: list[int] = []
        self.rows: list[int] = []
        self.terms: list[tuple[int, float]] = []
        self.count = 0

    def column(self, cost: float = 0.0, size: float = 0.0, upper: float = 1.0,
               seconds: float = 0.0, flops: float = 0.0, whole: bool = True) -> int:  # fmt: skip
        """A new column; `size` is on the device, `seconds` on the link; `flops` are in the cost.

        One that is not `whole` may be any number.
        """
        self.cost.append(cost)
        self.flops.append(flops)
        self.size.append(size)
        self.seconds.append(seconds)
        self.upper.append(upper)
        self.lower.append(0.0)
        self.whole.append(int(whole))
        return len(self.cost) - 1

    def row(self, *terms: tuple[int, float]) -> None:
        """The sum of terms is at least 0."""
        self.rows += [self.count] * len(terms)
        self.terms += terms
        self.count += 1

    def solve(self, budget: float, cost: Sequence[float], seconds: float, sure: bool = False,
              branches: int = BRANCHES) -> np.ndarray | None:  # fmt: skip
        """The columns of the least `cost` that fit in bytes and on the link; None if none do.

        It is near enough, or the best of so many branches. `sure`: it is the least, or `NotSolved`.
        """
        if not cost:
            return np.zeros(0)
        gap = _GAP if sure or len(cost) < _SMALL else _LARGE_GAP
        limit = {} if sure else {"node_limit": branches}
        solution = self._run(budget, cost, seconds, 1, {"mip_rel_gap": gap, **limit})
        if sure and solution.status not in (_SOLVED, _NONE):
            raise NotSolved(
                "a budget with solver='exact'",
                f"HiGHS stopped before it was sure: {solution.message}",
                "",
                "give solver='auto', which takes the best plan that was found",
            )
        return solution.x

    def bound(self, budget: float, seconds: float) -> float | None:
        """What the least FLOPs are at least: columns may be any numbers between 0 and 1."""
        if not self.flops:
            return 0.0
        solution = self._run(budget, self.flops, seconds, 0, {})
        return float(np.dot(solution.x, self.flops)) if solution.status == _SOLVED else None

    def _run(self, budget: float, cost: Sequence[float], seconds: float, whole: int,
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
            integrality=whole * np.asarray(self.whole),
            bounds=optimize.Bounds(*limits),
            constraints=constraints,
            options=options,
        ))  # fmt: skip


def _interruptible(run: Any) -> Any:
    """What a function returns that does not look for Ctrl-C itself."""
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
