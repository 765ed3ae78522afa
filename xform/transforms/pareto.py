"""`pareto`: what each number of bytes costs in work, beside the stock policies."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform import alive, policies
from xform.callables import function_name
from xform.errors import BudgetInfeasible, WrongArgument
from xform.planner.plan.plan import Plan
from xform.planner.report.pareto import Pareto, Point
from xform.transforms.function import Tree
from xform.transforms.plan import plan

_STOCK = (
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)


def pareto(
    f: Callable[..., Any],
    *args: Tree,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    target: str | None = None,
    points: int = 8,
    verify: bool = True,
) -> Pareto:
    """The bytes of differentiating `f` against the work that is run again.

    Args:
      f: pure function of pytrees of arrays that returns a scalar.
      *args: arrays, or `jax.ShapeDtypeStruct`s in pytrees; nothing is run or allocated.
      argnums: position or positions of the arguments to differentiate.
      has_aux: whether `f` returns a pair, of which only the first is differentiated.
      target: the backend; None is JAX's default.
      points: options many budgets are planned, from what `min_cut` takes down to the floor.
      verify: whether xform's plans are compiled; without, their bytes are simulated.

    Returns:
      A `Pareto`: prints as a table, draws itself with `plot(path)`. Beside the budgets stand all of
      JAX's stock policies, from everything saved, as `jax.grad` does, to nothing, each for the
      whole function.

    Raises:
      WrongArgument: as `xform.plan`.

    Cost: `points` plans, each compiled once to three times, and four for the stock policies.

    >>> curve = xform.pareto(lambda x: jnp.sum(jnp.sin(x @ x) @ x), jnp.ones((64, 64)), points=2)
    >>> [p.name for p in curve if p.stock][0]
    'everything_saveable'
    """
    number: Any = points
    if not isinstance(number, int) or points < 1:
        raise WrongArgument(f"pareto with points={points!r}", "it is no number of plans", "",
                            "give a positive integer")  # fmt: skip
    options: dict[str, Any] = {
        "argnums": argnums, "has_aux": has_aux, "target": target, "verify": verify,
    }  # fmt: skip
    made = itertools.count(1)

    def planned(policy: Any) -> Plan:
        alive.progress(f"plan {next(made)} of {points + 1 + len(_STOCK)}")
        return plan(f, *args, **options, policy=policy)

    with alive.working(f"pareto of {function_name(f)}"):
        first = planned(None)
        plans, low = [first], _floor(planned, first)
        for i in range(1, points):
            budget = round(_peak(first) + (low - _peak(first)) * i / max(points - 1, 1))
            with contextlib.suppress(BudgetInfeasible):
                plans.append(planned(policies.budget(budget)))
        ours = [_point(p.policy, p, False) for p in dict.fromkeys(plans)]
        ours.sort(key=lambda p: -p.peak_bytes)
        stock = [
            _point(name, planned(getattr(jax.checkpoint_policies, name)), True) for name in _STOCK
        ]
    return Pareto(first.function, first.target, verify, (*ours, *stock))


def _point(name: str, result: Plan, stock: bool) -> Point:
    # A backward pass is two forward ones.
    time = 1 + result.recompute_flops / max(3 * result.forward_flops, 1)
    # A bound of 0 says nothing, but where nothing is run again.
    least = (result.least_flops or None) if result.recompute_flops else 0
    return Point(name, stock, _peak(result), result.recompute_flops, least, result.seconds, time)


def _peak(result: Plan) -> int:
    return result.predicted_bytes if result.compiled_bytes is None else result.compiled_bytes


def _floor(planned: Callable[[Any], Plan], first: Plan) -> int:
    """The lowest peak, which a refusal names."""
    try:
        planned(policies.budget(0))
    except BudgetInfeasible as error:
        return min(error.floor_bytes, _peak(first))
    return _peak(first)
