"""The first of several ways to compute something that the compiler puts within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax

from xform.budgets import Budget
from xform.errors import BudgetInfeasible
from xform.text import human_bytes

Way = TypeVar("Way")


def compiled_bytes(run: Callable[..., Any], avals: Sequence[Any]) -> float:
    """Bytes of a function of flat arguments, compiled: arguments, outputs and what is between.

    Infinite if the compiler refuses the program, or says nothing.
    """
    try:
        said = jax.jit(run).lower(*avals).compile().memory_analysis()
    except jax.errors.JaxRuntimeError:  # it does not fit the device
        return math.inf
    if said is None:
        return math.inf
    held = said.argument_size_in_bytes + said.output_size_in_bytes
    return held + said.temp_size_in_bytes - said.alias_size_in_bytes


def first_within(budget: Budget, ladders: Iterable[Sequence[Way]],
                 bytes_of: Callable[[Way], float], remedy: str) -> Way:  # fmt: skip
    """The first way within a budget, or `BudgetInfeasible`.

    Each ladder is a list of ways to do the same with fewer bytes from one to the next: its last one
    is compiled first, and if that is within the budget, its first one that is, is found by
    bisection. Ladders come by rising work.
    """
    floor = math.inf
    for ladder in ladders:
        least = bytes_of(ladder[-1])
        floor = min(floor, least)
        if least > budget.bytes:
            continue
        low, high = 0, len(ladder) - 1
        while low < high:
            middle = (low + high) // 2
            if bytes_of(ladder[middle]) <= budget.bytes:
                high = middle
            else:
                low = middle + 1
        return ladder[low]
    known = floor < math.inf
    raise BudgetInfeasible(
        f"policy={budget!r}",
        f"the lowest peak found takes {human_bytes(int(floor))} (compiled): arguments, outputs and "
        "all that is between"
        if known
        else "the compiler refused every way that was tried",
        "",
        remedy,
        int(floor) if known else 0,
    )
