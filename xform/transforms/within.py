"""Try several ways to compute something, and take the first whose compiled bytes fit a budget."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from xform._jax import staging
from xform.errors import BudgetInfeasible
from xform.planner.device import resolve_fit
from xform.policies import min_cut, parse, save_nothing
from xform.policies.budgets import Budget
from xform.program.ir import evaluate, lift_constants, trace
from xform.terminal import progress_line
from xform.terminal.text import human_bytes

Way = TypeVar("Way")


def compiled_bytes(run: Callable[..., Any], avals: Sequence[Any]) -> float:
    """Return the bytes of a compiled function of flat arguments, with arguments and outputs.

    Infinite if the compiler refuses the program or reports nothing.
    """
    try:
        said = jax.jit(run).lower(*avals).compile().memory_analysis()
    except jax.errors.JaxRuntimeError:  # the program does not fit the device
        return math.inf
    if said is None:
        return math.inf
    held = said.argument_size_in_bytes + said.output_size_in_bytes
    return held + said.temp_size_in_bytes - said.alias_size_in_bytes


def first_within(budget: Budget, ladders: Iterable[Sequence[Way]],
                 bytes_of: Callable[[Way], float], remedy: str) -> Way:  # fmt: skip
    """Return the first way that fits a budget, or raise BudgetInfeasible.

    Ladders come in order of rising work. A ladder is a list of ways to compute the same values,
    each with fewer bytes than the one before. The last way of a ladder is compiled first. If it
    fits, bisection finds the first way of this ladder that fits.
    """
    floor, compiles = math.inf, itertools.count(1)

    def size(way: Way) -> float:
        progress_line.update(f"compiling way {next(compiles)}")
        return bytes_of(way)

    with progress_line.show("choosing what fits the budget"):
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
        "temporary memory"
        if known
        else "the compiler refused every way that was tried",
        "",
        remedy,
        int(floor) if known else 0,
    )


def reverse_policies(budget: Budget) -> Iterator[Any]:
    """Yield policies for reverse mode under a budget of the peak, in order of rising work."""
    yield None
    yield min_cut
    for share in (2, 4):
        yield dataclasses.replace(budget, bytes=budget.bytes // share, verify=False)
    yield save_nothing


def run_within(policy: Any, run: Callable[[Any], Any], args: Sequence[Any]) -> Any:
    """Return `run(policy)(*args)`; under a budget of the peak, run the first policy that fits it.

    Under a budget the function is compiled, because operation by operation it would not fit.
    """
    policy = resolve_fit(parse(policy))
    if not isinstance(policy, Budget) or policy.of != "peak":
        return run(policy)(*args)

    def bytes_of(way: Any) -> float:
        flat = lambda *xs: jax.tree.leaves(run(way)(*xs))
        try:
            prog, _ = lift_constants(trace(flat, *args))
        except BudgetInfeasible:  # raised for a smaller budget of one part
            return math.inf
        return compiled_bytes(lambda *xs: evaluate(prog, xs), prog.in_types)

    remedy = "raise the budget, make the batch smaller, or use xform.remat on the largest part"
    chosen = run(
        first_within(policy, ([way] for way in reverse_policies(policy)), bytes_of, remedy)
    )
    return (chosen if staging() else jax.jit(chosen))(*args)
