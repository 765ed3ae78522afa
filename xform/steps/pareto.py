"""`pareto`: peak memory against recomputed FLOPs, for xform's plans and the stock policies.

A *plan* says which values the backward pass saves and which it recomputes. The *stock policies* are
the four policies of `jax.checkpoint_policies` that take no arguments, under xform's names
(`_STOCK`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from xform import policies
from xform.errors import BudgetInfeasible, WrongArgument
from xform.introspection.callables import function_name
from xform.planner.plan.plan import Plan
from xform.planner.report.pareto import Pareto, ParetoPoint
from xform.policies.sample import check_known_sizes
from xform.steps.plan import plan
from xform.steps.step_plan import StepPlan
from xform.terminal import progress_line
from xform.transforms.function import Tree

# The plan of a loss, or of a step.
AnyPlan = Plan | StepPlan

_STOCK = (
    "save_everything",
    "save_dots",
    "save_dots_with_no_batch_dims",
    "save_nothing",
)


def pareto(
    f: Callable[..., Any],
    *args: Tree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    target: str | None = None,
    points: int = 8,
    verify: bool = True,
    slices: bool = False,
) -> Pareto:
    """Compute how many FLOPs the derivatives of `f` recompute to take less peak memory.

    The first plan is the plan of `min_cut`, the default policy. The other plans are for budgets of
    the peak, in equal steps from the peak of `min_cut` down to the lowest peak that a search finds.
    A budget that no plan fits is left out, so there may be fewer plans than `points`.

    Args:
      f: a loss, which is a pure function of pytrees of arrays that returns a scalar; or a training
        step that `xform.jit` returns, see `plan`.
      *args: arrays, or `jax.ShapeDtypeStruct`s in pytrees; nothing is run or allocated.
      argnums: position or positions of the arguments to differentiate.
      has_aux: whether `f` returns a pair `(output, auxiliary)`; the second is not differentiated.
      target: the device to plan for, such as "cpu", "tpu:v5e:1x1" or "gpu:h100", attached or not;
        None is JAX's default backend.
      points: the largest number of plans, the one of `min_cut` included; a positive integer. The
        stock policies are not counted.
      verify: whether the compiler measures the peak of each plan, also for the stock policies.
        Otherwise the peaks are simulated.
      slices: whether to add plans that run regions of the program in slices. There are at most half
        as many as `points`, for budgets below the lowest peak without slices.

    Returns:
      A `Pareto` with one point for each plan, by falling peak bytes, then one for each plan with
      slices, and then one for each of four stock policies: `save_everything`, as in `jax.grad`,
      `save_dots`, `save_dots_with_no_batch_dims` and `save_nothing`. Each stock policy decides for
      the whole function. `print` shows the points as a table; `plot(path)` draws them.

    Raises:
      WrongArgument: for the same reasons as in `xform.plan`, or `points` is not positive.

    Cost: one plan for `min_cut`, `points - 1` plans for budgets, one search for the lowest peak,
    and four plans for the stock policies. With `verify`, `min_cut` and each stock policy compile
    one program, and each budget and the search at most seven more. No program is compiled twice.
    With `slices`, each plan with slices and one more search compile up to about ten programs.

    >>> curve = xform.pareto(lambda x: jnp.sum(jnp.sin(x @ x) @ x), jnp.ones((64, 64)), points=2)
    >>> [p.name for p in curve if p.stock][0]
    'save_everything'
    """
    number: Any = points
    if not isinstance(number, int) or points < 1:
        raise WrongArgument(f"pareto with points={points!r}", "it is not a number of plans", "",
                            "give a positive integer")  # fmt: skip
    check_known_sizes(f"pareto of {function_name(f)}", args)
    options: dict[str, Any] = {
        "argnums": argnums, "has_aux": has_aux, "target": target, "verify": verify,
    }  # fmt: skip
    plan_numbers, n_sliced = itertools.count(1), max(points // 2, 1) if slices else 0
    total = points + 1 + len(_STOCK) + (n_sliced + 1 if slices else 0)

    def plan_under(policy: Any) -> AnyPlan:
        progress_line.update(f"plan {next(plan_numbers)} of {total}")
        return plan(f, *args, **options, policy=policy)

    with progress_line.show(f"pareto of {function_name(f)}"):
        default = plan_under(policies.min_cut)
        highest, lowest = _peak(default), _lowest_peak(plan_under, default)
        budgets = _steps(highest, lowest, points - 1)
        plans = [default, *_feasible(plan_under, map(policies.budget, budgets))]
        own_points = _points(plans)
        if slices:
            least = _lowest_peak(plan_under, default, slices=True)
            sliced = (policies.budget(n, slices=True) for n in _steps(lowest, least, n_sliced))
            own_points += _points([p for p in _feasible(plan_under, sliced) if p.slices])
        stock_points = [_point(name, plan_under(name), True) for name in _STOCK]
    return Pareto(default.function, default.target, verify, (*own_points, *stock_points))


def _point(name: str, result: AnyPlan, stock: bool) -> ParetoPoint:
    """Return the point of a plan; `stock` says whether a stock policy of JAX made the plan."""
    # The estimated time of a step, relative to a step that recomputes nothing. That step is one
    # forward pass, and a backward pass that takes about as long as two forward passes.
    time = 1 + result.recompute_flops / max(3 * result.forward_flops, 1)
    # A lower bound of 0 on the recomputed FLOPs says nothing, unless the plan recomputes nothing.
    least = (result.least_flops or None) if result.recompute_flops else 0
    return ParetoPoint(
        name,
        stock,
        _peak(result),
        result.recompute_flops,
        least,
        result.seconds,
        time,
        tuple(decision.n for decision in result.slices),
        result.offloaded_bytes,
        result.compile_seconds,
    )


def _points(plans: Sequence[AnyPlan]) -> list[ParetoPoint]:
    """Return the points of xform's own plans, by falling bytes; equal plans are one point."""
    points = [_point(p.policy, p, False) for p in dict.fromkeys(plans)]
    return sorted(points, key=lambda p: -p.peak_bytes)


def _steps(highest: int, lowest: int, n: int) -> list[int]:
    """Return `n` numbers of bytes in equal steps, from below `highest` down to `lowest`."""
    return [round(highest + (lowest - highest) * i / n) for i in range(1, n + 1)]


def _feasible(plan_under: Callable[[Any], AnyPlan], budgets: Iterable[Any]) -> Iterator[AnyPlan]:
    """Yield the plans of the budgets that a plan fits."""
    for budget in budgets:
        with contextlib.suppress(BudgetInfeasible):
            yield plan_under(budget)


def _peak(result: AnyPlan) -> int:
    """Return the compiled peak of a plan in bytes; if it was not compiled, the simulated peak."""
    return result.predicted_bytes if result.compiled_bytes is None else result.compiled_bytes


def _lowest_peak(
    plan_under: Callable[[Any], AnyPlan], default: AnyPlan, slices: bool = False
) -> int:
    """Return the lowest peak that the planner finds, at most the peak of the plan `default`.

    No plan fits a budget of 0 bytes, so planning raises an error, which contains the lowest peak.
    """
    try:
        plan_under(policies.budget(0, slices=slices))
    except BudgetInfeasible as error:
        return min(error.floor_bytes, _peak(default))
    return _peak(default)
