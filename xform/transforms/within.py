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
from xform._jax import closed_jaxpr, jit, staging, trace_to_jaxpr
from xform.errors import BudgetInfeasible
from xform.planner.choice import Choice
from xform.planner.device import current_device, resolve_fit
from xform.planner.measure import Measure
from xform.planner.plan_program import plan_program
from xform.planner.search import search
from xform.policies import Policy, min_cut, parse
from xform.policies.budgets import Budget
from xform.policies.sample import sample_for
from xform.program.dimensions import at_sample
from xform.program.ir import trace
from xform.terminal import progress_line
from xform.terminal.text import human_bytes
from xform.transforms.outside import with_outside_bytes
from xform.transforms.recorded import Chosen, recorded, with_lifted_constants


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
        chosen, inputs = _search(caller, run_of_arrays, policy, arrays)
    leaves = (chosen.run if staging() else jit(chosen.run))(*inputs)
    return jax.tree.unflatten(chosen.recorded.out_tree, leaves)


def _search(name: str, run: Callable[[Any], Callable[..., Any]], budget: Budget,
            args: Sequence[Any]) -> tuple[Chosen, Sequence[Any]]:  # fmt: skip
    """Return a computation under plans that keep the budget, and its inputs.

    The values that the function closes over are inputs too.
    """
    default = dataclasses.replace(min_cut, regions=budget.regions)

    def trace_once(policy: Policy) -> tuple[Any, Any]:
        trees: list[Any] = []

        def flat(*args: Any) -> list[Any]:
            leaves, tree = jax.tree.flatten(run(policy)(*args))
            trees[:] = [tree]
            return leaves

        return closed_jaxpr(*trace_to_jaxpr(flat, args)), trees[0]

    recording, consts = with_lifted_constants(recorded(default, True, trace_once))
    start, args = Chosen(recording, recording.defaults), [*consts, *args]
    types = [*map(jax.typeof, args)]
    with at_sample(sample_for(budget, types)):
        if not recording.derivatives:
            _check_without_derivatives(name, budget, memory.compiled_bytes(start.run, types))
            return start, args
        whole = trace(start.run, *types)
        problems = with_outside_bytes(start, whole, current_device().backend, budget.regions)
        begin = {key: plan_program(problem, default) for key, problem in problems.items()}

        def bytes_of(choice: Choice) -> float:
            return memory.compiled_bytes(Chosen(recording, choice.candidates).run, types)

        measure = Measure(bytes_of) if budget.verify else None
        return Chosen(recording, search(problems, budget, begin, measure)), args


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
