"""A step that was planned for some types, and what `lower` returns for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from xform.errors import WrongArgument
from xform.memory.report import MemoryReport
from xform.steps.plan import StepPlan
from xform.steps.program import CompiledStep
from xform.transforms.recorded import Chosen


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step for some types.

    The compiled program and the reports are made when they are first asked for, unless a search for
    a budget has made them.

    Attributes:
      chosen: the recorded step, with the plans of its derivatives.
      shardings: the sharding of each argument; None for a value that has none.
    """

    chosen: Chosen
    shardings: list[Any]
    _make_plan: Callable[[], StepPlan]
    _compile: Callable[[], CompiledStep]
    _make_report: Callable[[CompiledStep], MemoryReport]

    @functools.cached_property
    def compiled(self) -> CompiledStep:
        """The compiled step. JAX compiles it once, for this and for the calls of the step."""
        return self._compile()

    @functools.cached_property
    def plan(self) -> StepPlan:
        """The plans of the derivatives, with the compiler's bytes of the step."""
        plan = self._make_plan()
        if plan.compiled_bytes is not None:
            return plan
        return plan.with_compiled_bytes(self.compiled.compilation.total_bytes)

    @functools.cached_property
    def report(self) -> MemoryReport:
        """The report of the compiled step."""
        return self._make_report(self.compiled)


class LoweredStep:
    """A planned step for some types: what JAX's `Lowered` object has, and the plan."""

    def __init__(self, name: str, planned: PlannedStep):
        self._name, self._planned = name, planned

    @property
    def plan(self) -> StepPlan:
        """The plans of the derivatives."""
        return self._planned.plan

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
