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
from xform.planner.device import current_device, resolve_fit
from xform.planner.plan_program import plan_program
from xform.planner.plan_several import plan_several
from xform.policies import Policy, min_cut, parse
from xform.policies.budgets import Budget
from xform.policies.sample import sample_for
from xform.program.dimensions import at_sample
from xform.program.ir import trace
from xform.terminal import progress_line
from xform.terminal.text import human_bytes
from xform.transforms.outside import with_outside_bytes
from xform.transforms.recorded import Chosen, recorded


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
        chosen = _search(caller, run_of_arrays, policy, arrays)
    leaves = (chosen.run if staging() else jit(chosen.run))(*arrays)
    return jax.tree.unflatten(chosen.recorded.out_tree, leaves)


def _search(name: str, run: Callable[[Any], Callable[..., Any]], budget: Budget,
            args: Sequence[Any]) -> Chosen:  # fmt: skip
    """Return plans of all derivatives in a computation under which it keeps the budget."""
    default = dataclasses.replace(min_cut, regions=budget.regions)

    def trace_once(policy: Policy) -> tuple[Any, Any]:
        traced = jit(run(policy)).trace(*args)
        return traced.jaxpr, jax.tree.structure(traced.out_info)

    recording = recorded(default, True, trace_once)
    start = Chosen(recording, recording.defaults)
    types = [*map(jax.typeof, args)]
    with at_sample(sample_for(budget, types)):
        if not recording.derivatives:
            _check_without_derivatives(name, budget, memory.compiled_bytes(start.run, types))
            return start
        whole = trace(start.run, *types)
        problems = with_outside_bytes(start, whole, current_device().backend, budget.regions)
        measure = lambda plans: memory.compiled_bytes(Chosen(recording, plans).run, types)
        begin = {key: plan_program(problem, default) for key, problem in problems.items()}
        return Chosen(recording, plan_several(problems, budget, begin, measure))


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
