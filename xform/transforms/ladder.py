"""Choose the first of several variants of a computation whose compiled bytes fit a budget.

It is for choices that are not plans of a derivative, such as the number of columns of a Jacobian
that are computed at once, or the named values that layers save under plain JAX.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from xform.errors import BudgetInfeasible
from xform.policies.budgets import Budget
from xform.terminal import progress_line
from xform.terminal.text import human_bytes

Variant = TypeVar("Variant")


def first_within(budget: Budget, ladders: Iterable[Sequence[Variant]],
                 bytes_of: Callable[[Variant], float], remedy: str) -> Variant:  # fmt: skip
    """Return the first variant that fits a budget.

    Args:
      budget: the budget of the peak.
      ladders: lists of variants, in order of rising work. In a list, each variant takes fewer bytes
        than the one before. The last one is compiled first. If it fits, bisection finds the first
        variant of this list that fits.
      bytes_of: the compiled bytes of a variant.
      remedy: the remedy in the error.

    Raises:
      BudgetInfeasible: no variant fits.
    """
    floor, compiles = math.inf, itertools.count(1)

    def size(variant: Variant) -> float:
        progress_line.update(f"compiling variant {next(compiles)}")
        return bytes_of(variant)

    with progress_line.show("choosing a variant that fits the budget"):
        for ladder in ladders:
            least = size(ladder[-1])
            floor = min(floor, least)
            if least <= budget.bytes:
                first = bisect.bisect_left(
                    ladder[:-1], True, key=lambda variant: size(variant) <= budget.bytes
                )
                return ladder[first]
    known = floor < math.inf
    raise BudgetInfeasible(
        f"policy={budget!r}",
        f"the lowest peak found takes {human_bytes(int(floor))} (compiled): arguments, outputs and "
        "temporary memory"
        if known
        else "the compiler refused every program that was tried, because none fits the device",
        "",
        remedy,
        int(floor) if known else 0,
    )
