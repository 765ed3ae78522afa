"""Compile a function under a policy for a target, and report its memory.

A policy says which values the backward pass saves. A budget is a policy that keeps the bytes of the
peak below a limit. A target is a device to compile for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xform.errors import BudgetInfeasible, NotOneDerivative, NotScalar
from xform.memory.analysis import memory_analysis
from xform.memory.report import MemoryReport
from xform.memory.targets import parse_target
from xform.planner.device import resolve_fit
from xform.planner.plan.plan import Plan
from xform.planner.planning import measure_planning
from xform.policies import as_code, min_cut, policy_name
from xform.policies.budgets import Budget, Fit, bytes_of
from xform.terminal.text import human_bytes
from xform.transforms.function import Tree
from xform.transforms.inspect import SUBJECT
from xform.transforms.plan import plan
from xform.transforms.planning_task import check_step, with_policy
from xform.transforms.reverse import Policy

# `_report` makes the budgets of the derivatives smaller and compiles again, at most _MAX_COMPILES
# times. Each time it subtracts the excess bytes times _EXCESS_FACTOR. If the last reduction changed
# nothing, it multiplies the bytes subtracted so far by _SPEEDUP instead.
_MAX_COMPILES, _EXCESS_FACTOR, _SPEEDUP = 4, 1.05, 2.5


def report_on(target: str | None, f: Callable[..., Any], args: Sequence[Tree], policy: Policy,
            argnums: int | Sequence[int] = 0, policy_argument: str | None = None,
            **options: Any) -> MemoryReport:  # fmt: skip
    """Return the memory report of a function under a policy on a target, with the policy's name.

    With `policy_argument` the function is a step, and is called with the policy as that argument.
    Without it the function is a loss, and is differentiated under the policy. A budget of the peak
    limits the whole function. `options` are those of `memory_analysis`.

    Raises:
      BudgetInfeasible: no plan was found that fits the budget.
      NotScalar: without `policy_argument`, the function is a step.
    """
    policy = _resolve_auto(policy, target, options)
    if policy_argument is not None:
        check_step(f, args, policy_argument, argnums, False, "compare")
    try:
        report = _report(target, f, args, policy, argnums, policy_argument, **options)
    except NotScalar as error:
        raise NotScalar(error.request, error.problem, error.where, SUBJECT) from None
    description = dataclasses.replace(report.description, policy=policy_name(policy))
    return dataclasses.replace(report, description=description)


def _report(target: str | None, f: Callable[..., Any], args: Sequence[Tree], policy: Policy,
            argnums: int | Sequence[int], policy_argument: str | None, **options: Any
            ) -> MemoryReport:  # fmt: skip
    """Return the memory report of `report_on`, without the policy's name.

    Under a budget of the peak, `plan` plans the derivative within the whole function, if the
    function takes only one derivative and no option such as `mesh` is given. Otherwise the default
    policy is compiled first. If it does not fit, each derivative is planned for a smaller budget:
    the excess that the compiler reports is subtracted, and the function is compiled again, at most
    four times. Before the budget is refused, the plan with the lowest peak is compiled, for the
    error.
    """

    def compiled_under(policy: Policy) -> MemoryReport:
        run, extra = with_policy(f, policy, argnums, policy_argument)
        with measure_planning() as spent:
            report = memory_analysis(run, *args, target=target, **extra, **options)
        work = policy.summary if isinstance(policy, Plan) else str(spent)
        new = dataclasses.replace(report.description, code=as_code(policy), planned=work)
        return dataclasses.replace(report, description=new)

    if not isinstance(policy, Budget) or policy.of != "peak":
        return compiled_under(policy)
    if options.keys() <= {"donate_argnums", "capacity"}:
        donated = options.get("donate_argnums", ())
        with contextlib.suppress(NotOneDerivative):
            chosen = plan(f, *args, policy=policy, argnums=argnums,
                          policy_argument=policy_argument, target=target,
                          donate_argnums=donated)  # fmt: skip
            report = compiled_under(chosen)
            code = f"xform.plan(f, *args, policy={as_code(policy)}, target={report.target!r})"
            return dataclasses.replace(
                report, description=dataclasses.replace(report.description, code=code)
            )
    default = compiled_under(min_cut)
    if default.total_bytes is not None and default.total_bytes <= policy.bytes:
        return default
    # The whole function is compiled, so the derivatives in it need not be compiled alone.
    inner, subtracted, sizes = dataclasses.replace(policy, verify=False), 0.0, list[int]()
    while not sizes or (len(sizes) < _MAX_COMPILES and subtracted < policy.bytes):
        try:
            report = compiled_under(inner)
        except BudgetInfeasible:
            break
        size = report.total_bytes
        if size is None:
            break
        excess = size - policy.bytes
        if excess <= 0:
            return report
        if size in sizes:  # the smaller budget has changed nothing
            subtracted *= _SPEEDUP
        else:
            subtracted += _EXCESS_FACTOR * excess
        sizes.append(size)
        inner = dataclasses.replace(inner, bytes=max(0, policy.bytes - math.ceil(subtracted)))
    report = _lowest_report(inner, compiled_under)
    least = min([n for n in (*sizes, report.total_bytes) if n is not None], default=None)
    if report.total_bytes is not None and report.total_bytes <= policy.bytes:
        return report
    raise BudgetInfeasible(
        f"{getattr(f, '__name__', 'a function')} with policy={policy_name(policy)}",
        f"the lowest of {len(sizes) + 1} compiled plans takes {human_bytes(least)}; this includes "
        "values outside the derivative, such as an optimizer's state",
        "",
        "raise the budget, donate arguments that are not read later, make the batch smaller, or "
        "shard the largest arguments",
        least or 0,
    )


def _resolve_auto(policy: Policy, target: str | None, options: Mapping[str, Any]) -> Policy:
    """Replace "auto" by the budget, or the default policy, that it stands for on a target."""
    parsed, capacity = parse_target(target), options.get("capacity")
    if isinstance(policy, Fit) and capacity is not None:
        return policy.within(bytes_of(capacity, f"capacity={capacity!r}"), parsed.device.name)
    with parsed.planned_for():
        return resolve_fit(policy)


def _lowest_report(
    budget: Budget, compiled_under: Callable[[Policy], MemoryReport]
) -> MemoryReport:
    """Return the report in which each derivative has the lowest peak that a plan can reach.

    A budget that is too small raises an error with the lowest peak of one derivative. That peak is
    the next budget, until all derivatives fit.
    """
    size = 0
    while True:
        try:
            return compiled_under(dataclasses.replace(budget, bytes=size))
        except BudgetInfeasible as error:
            if error.floor_bytes <= size:
                raise
            size = error.floor_bytes
