"""A step that was planned for some types, and what `lower` returns for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from xform.errors import WrongArgument
from xform.memory.report import MemoryReport
from xform.planner.bound import least_flops
from xform.planner.choice import Problems
from xform.policies import Budget, as_code
from xform.policies.budgets import bounds_peak
from xform.steps.program import CompiledStep
from xform.steps.step_plan import StepPlan
from xform.transforms.recorded import Chosen


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step for some types.

    The compiled program and the reports are made when they are first asked for, unless a search for
    a budget has made them.

    Attributes:
      chosen: the recorded step, with the plans of its derivatives.
      shardings: the sharding of each argument; None for a value that has none.
      policy: the policy that chose the plans.
      subject: the fields of a report about the arguments, see `subject_of`.
    """

    chosen: Chosen
    shardings: list[Any]
    policy: Any
    subject: Mapping[str, Any]
    _make_problems: Callable[[], Problems]
    _make_plan: Callable[[], StepPlan]
    _compile: Callable[[], CompiledStep]

    @functools.cached_property
    def compiled(self) -> CompiledStep:
        """The compiled step. JAX compiles it once, for this and for the calls of the step."""
        return self._compile()

    @functools.cached_property
    def uncompiled_plan(self) -> StepPlan:
        """The plans of the derivatives. Only a search for a budget has compiled the step."""
        return self._make_plan()

    @functools.cached_property
    def plan(self) -> StepPlan:
        """The plans of the derivatives, with the compiler's bytes of the step."""
        plan = self.uncompiled_plan
        if plan.compiled_bytes is not None:
            return plan
        return plan.with_compilation(self.compiled.compilation)

    @functools.cached_property
    def problems(self) -> Problems:
        """The derivatives of the step, with the bytes that it holds outside of them."""
        return self._make_problems()

    def bounded_plan(self, verify: bool) -> StepPlan:
        """The plan with lower bounds on the recomputed FLOPs; with `verify`, it is compiled."""
        plan = self.plan if verify else self.uncompiled_plan
        if not isinstance(self.policy, Budget):
            return plan
        plans = {
            k: dataclasses.replace(one, least_flops=least_flops(self.problems[k], self.policy))
            for k, one in plan.plans.items()
        }
        return dataclasses.replace(plan, plans=plans)

    @functools.cached_property
    def report(self) -> MemoryReport:
        """The report of the compiled step."""
        report = dataclasses.replace(self.compiled.compilation, **self.subject)
        plan = self.plan
        code = as_code(self.policy)
        description = dataclasses.replace(
            report.description,
            policy=plan.policy,
            code=f"xform.jit(f, {code})" if code and bounds_peak(self.policy) else code,
            planned=plan.planning,
        )
        return dataclasses.replace(report, description=description)


class LoweredStep:
    """A planned step for some types: what JAX's `Lowered` object has, and the plan."""

    def __init__(self, name: str, planned: PlannedStep):
        self._name, self._planned = name, planned

    @property
    def plan(self) -> StepPlan:
        """The plans of the derivatives."""
        return self._planned.plan

    def bounded_plan(self, verify: bool) -> StepPlan:
        """The plan with lower bounds on the recomputed FLOPs; with `verify`, it is compiled."""
        return self._planned.bounded_plan(verify)

    def memory_analysis(self) -> MemoryReport:
        """A report of the compiled step. It compiles the step unless that was done before."""
        return self._planned.report

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """JAX's `Compiled` object. It is compiled again only if compiler options are given."""
        executable = self._planned.compiled.executable
        if any(args) or any(kwargs.values()) or executable is None:
            return self._lowered().compile(*args, **kwargs)
        return executable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowered(), name)

    def _lowered(self) -> Any:
        lowered = self._planned.compiled.lowered
        if lowered is None:
            raise WrongArgument(
                f"a method of the lowered step {self._name}, which xform.jit compiled for "
                f"{self.plan.target!r}",
                "the devices of this target are not attached to this process",
                "",
                "use plan and memory_analysis(), which need no devices",
            )
        return lowered
