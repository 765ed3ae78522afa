"""The first of several ways to compute something that the compiler puts within a budget."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from xform import alive
from xform._jax import staging
from xform.budgets import Budget
from xform.errors import BudgetInfeasible
from xform.ir import evaluate, lifted, trace
from xform.planner.device import in_bytes
from xform.policies import check, min_cut, save_nothing
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
    floor, compiles = math.inf, itertools.count(1)

    def size(way: Way) -> float:
        alive.progress(f"compiling way {next(compiles)}")
        return bytes_of(way)

    with alive.working("choosing what fits the budget"):
        for ladder in ladders:
            least = size(ladder[-1])
            floor = min(floor, least)
            if least <= budget.bytes:
                at = bisect.bisect_left(
                    ladder[:-1], True, key=lambda way: size(way) <= budget.bytes
                )
                return ladder[at]
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


def ways(budget: Budget) -> Iterator[Any]:
    """What reverse mode may keep under a budget of the peak, by rising work."""
    yield None
    yield min_cut
    for share in (2, 4):
        yield dataclasses.replace(budget, bytes=budget.bytes // share, verify=False)
    yield save_nothing


def run_within(policy: Any, run: Callable[[Any], Any], args: Sequence[Any]) -> Any:
    """`run(policy)` at flat `args`; of a budget of the peak, `run` of the first way that fits it.

    What `run(way)` returns is a function of `args`; it is compiled if it is to fit a budget, for
    operation by operation it would not.
    """
    policy = None if policy is None else in_bytes(check(policy))
    if not isinstance(policy, Budget) or policy.of != "peak":
        return run(policy)(*args)

    def bytes_of(way: Any) -> float:
        flat = lambda *xs: jax.tree.leaves(run(way)(*xs))
        try:
            prog, _ = lifted(trace(flat, *args))
        except BudgetInfeasible:  # of a smaller budget, for a part of it
            return math.inf
        return compiled_bytes(lambda *xs: evaluate(prog, xs), prog.in_types)

    remedy = "raise the budget, make the batch smaller, or mark with xform.remat what holds most"
    chosen = run(first_within(policy, ([way] for way in ways(policy)), bytes_of, remedy))
    return (chosen if staging() else jax.jit(chosen))(*args)
