"""Compile several variants of a computation, and take the first whose bytes fit a budget.

It is for derivatives that no single plan covers, such as a product with a Hessian. A variant is one
of several ways to compute the same values: a policy, or a choice of the caller.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from xform._jax import jit, staging
from xform.errors import BudgetInfeasible
from xform.planner.device import resolve_fit
from xform.policies import min_cut, parse, save_nothing
from xform.policies.budgets import Budget
from xform.program.ir import evaluate, lift_constants, trace
from xform.terminal import progress_line
from xform.terminal.text import human_bytes

Variant = TypeVar("Variant")


def compiled_bytes(run: Callable[..., Any], avals: Sequence[Any]) -> float:
    """Return the bytes of a compiled function, arguments and outputs included.

    `run` is a function of flat arguments of types `avals`. The result is infinite if the compiler
    refuses the program or reports nothing.
    """
    try:
        reported = jit(run).lower(*avals).compile().memory_analysis()
    except jax.errors.JaxRuntimeError:  # the program does not fit the device
        return math.inf
    if reported is None:
        return math.inf
    ends = reported.argument_size_in_bytes + reported.output_size_in_bytes
    return ends + reported.temp_size_in_bytes - reported.alias_size_in_bytes


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


def reverse_policies(budget: Budget) -> Iterator[Any]:
    """Yield policies to try under a budget of the peak, in order of rising work.

    They are for a derivative of several parts. Each part gets a half or a quarter of the budget.
    """
    yield None
    yield min_cut
    for share in (2, 4):
        yield dataclasses.replace(budget, bytes=budget.bytes // share, verify=False)
    yield save_nothing


def run_within(policy: Any, run: Callable[[Any], Any], args: Sequence[Any]) -> Any:
    """Return `run(policy)(*args)`; for a budget of the peak, under the first policy that fits it.

    `run` returns the function of `args` under a policy. Under a budget the function is compiled
    even outside `jit`, because operation by operation it would not fit.
    """
    policy = resolve_fit(parse(policy))
    if not isinstance(policy, Budget) or policy.of != "peak":
        return run(policy)(*args)

    def bytes_of(policy: Any) -> float:
        flat = lambda *xs: jax.tree.leaves(run(policy)(*xs))
        try:
            prog, _ = lift_constants(trace(flat, *args))
        except BudgetInfeasible:  # raised for a smaller budget of one part
            return math.inf
        return compiled_bytes(lambda *xs: evaluate(prog, xs), prog.in_types)

    remedy = "raise the budget, make the batch smaller, or use xform.remat on the largest part"
    chosen = run(
        first_within(policy, ([each] for each in reverse_policies(policy)), bytes_of, remedy)
    )
    return (chosen if staging() else jit(chosen))(*args)
