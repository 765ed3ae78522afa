"""Compute something that takes several derivatives, within a budget of its whole compiled program.

A product with a Hessian, for example, is a derivative of a derivative. Its budget limits the peak
memory of the whole product. The plans of the derivatives in it are searched as those of a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform import memory
from xform._jax import jit, staging
from xform.errors import BudgetInfeasible
from xform.planner.describe import plan_of_candidate
from xform.planner.device import current_device, resolve_fit
from xform.planner.plan_program import plan_program
from xform.planner.plan_several import plan_several
from xform.planner.search_several import Candidates
from xform.policies import min_cut, parse
from xform.policies.budgets import Budget
from xform.policies.sample import sample_for
from xform.program.dimensions import at_sample
from xform.program.ir import Program, evaluate, lift_constants, trace
from xform.terminal import progress_line
from xform.terminal.text import human_bytes
from xform.transforms.decisions import Decisions, Seen, decide_by
from xform.transforms.outside import with_outside_bytes


def run_within(
    caller: str, policy: Any, run: Callable[[Any], Callable[..., Any]], args: Sequence[Any]
) -> Any:
    """Return `run(policy)(*args)`; for a budget of the peak, under plans that keep the budget.

    Args:
      caller: the name of the public function, for messages.
      policy: a policy, or a budget of the peak of the whole computation.
      run: returns the function of `args` whose derivatives have the policy that `run` is given.
      args: arrays.

    Raises:
      BudgetInfeasible: the computation exceeds the budget under all plans that were tried.

    Cost: under a budget, at most eight compilations. The computation is compiled even outside
    `jit`, because operation by operation it would not fit.
    """
    policy = resolve_fit(parse(policy))
    if not isinstance(policy, Budget) or policy.of != "peak":
        return run(policy)(*args)
    # An array that is several arguments, as the point and the direction of a product, is in memory
    # once.
    arrays = list({id(x): x for x in args}.values())
    positions = {id(x): i for i, x in enumerate(arrays)}
    order = [positions[id(x)] for x in args]

    def run_of_arrays(policy: Any) -> Callable[..., Any]:
        return lambda *arrays: run(policy)(*(arrays[i] for i in order))

    with progress_line.show(f"planning {caller}"):
        decisions = _search(_Traceable(caller, run_of_arrays, arrays), policy)

    def chosen(*arrays: Any) -> Any:
        with decide_by(decisions):
            return run_of_arrays(decisions)(*arrays)

    return (chosen if staging() else jit(chosen))(*arrays)


@dataclasses.dataclass(frozen=True)
class _Traceable:
    """A computation that is traced and compiled under different plans of its derivatives."""

    name: str
    run: Callable[[Any], Callable[..., Any]]
    args: Sequence[Any]

    def trace(self, decisions: Decisions, seen: Seen | None = None) -> Program:
        """Trace it; the derivatives that it takes are added to `seen`."""
        flat = lambda *xs: jax.tree.leaves(self.run(decisions)(*xs))
        with decide_by(decisions, seen):
            return lift_constants(trace(flat, *self.args))[0]


def _search(computation: _Traceable, budget: Budget) -> Decisions:
    """Return plans of all derivatives in a computation under which it keeps the budget."""
    default = dataclasses.replace(min_cut, regions=budget.regions)
    unplanned = Decisions(default, {}, retrace=True, has_budget=True)
    seen: Seen = {}
    whole = computation.trace(unplanned, seen)
    with at_sample(sample_for(budget, whole.in_avals)):
        if not seen:
            _check_without_derivatives(computation.name, budget, _bytes_of(whole))
            return unplanned
        return _search_several(computation, budget, whole, seen)


def _search_several(
    computation: _Traceable, budget: Budget, whole: Program, seen: Seen
) -> Decisions:
    """Do the same for a computation with the derivatives `seen`; `whole` is its program."""
    default = dataclasses.replace(min_cut, regions=budget.regions)
    device = current_device()
    problems = with_outside_bytes(seen, whole, device.backend, budget.regions)

    def planned(candidates: Candidates) -> Decisions:
        name = f"a derivative in {computation.name}"
        plans = {
            k: plan_of_candidate(name, computation.name, problems[k], "", c, device.backend)
            for k, c in candidates.items()
        }
        return Decisions(default, plans, complete=True, has_budget=True)

    measure = lambda candidates: _bytes_of(computation.trace(planned(candidates)))
    start = {key: plan_program(problem, default) for key, problem in problems.items()}
    return planned(plan_several(problems, budget, start, measure))


def _check_without_derivatives(name: str, budget: Budget, size: float) -> None:
    """Raise BudgetInfeasible if a computation without derivatives exceeds the budget."""
    if size > budget.bytes:
        raise BudgetInfeasible(
            f"policy={budget!r} of {name}",
            f"it takes {human_bytes(int(size))} (compiled)"
            if size < math.inf
            else "the compiler refuses the program, because it does not fit the device",
            "",
            "raise the budget or make the batch smaller",
            int(size) if size < math.inf else 0,
        )


def _bytes_of(prog: Program) -> float:
    """Return the compiled bytes of a program."""
    return memory.compiled_bytes(lambda *xs: evaluate(prog, xs), prog.in_types)
