"""The methods of `xform.jit`'s functions, for the jitted functions of libraries.

Flax's `nnx.jit` and Equinox's `eqx.filter_jit` return an object that converts the library's
arguments to arrays and calls a function made by `jax.jit`. `xform.flax.jit` and
`xform.equinox.filter_jit` put a `JitStep` in the place of that function.
"""

from __future__ import annotations

from typing import Any

from xform.memory.report import MemoryReport
from xform.steps.jit import JitStep
from xform.steps.step import TrainingStep
from xform.steps.step_plan import StepPlan


class PlannedFunction(TrainingStep):
    """The methods about the program that was planned last. A subclass has `_step`."""

    _step: JitStep

    @property
    def plan(self) -> StepPlan:
        """The plans of the program that was planned last, as of `xform.jit`'s functions."""
        return self._step.plan

    def memory_analysis(self) -> MemoryReport:
        """A report of the program that was planned last; nothing is compiled again."""
        return self._step.memory_analysis()

    def explain(self, value: str) -> str:
        """Explain why a value is saved or not, see `Plan.explain`."""
        return self._step.explain(value)


class PlannedLowered:
    """A library's `Lowered` object of a planned step, with the plan.

    Args:
      lowered: the library's object. Its attribute `lowered` is what `JitStep.lower` returned.
    """

    def __init__(self, lowered: Any):
        self._lowered = lowered

    @property
    def plan(self) -> StepPlan:
        """The plans of the derivatives of the step."""
        return self._lowered.lowered.plan

    def bounded_plan(self, verify: bool) -> StepPlan:
        """The plan with lower bounds on the recomputed FLOPs; with `verify`, it is compiled."""
        return self._lowered.lowered.bounded_plan(verify)

    def memory_analysis(self) -> MemoryReport:
        """A report of the compiled step; nothing is compiled again."""
        return self._lowered.lowered.memory_analysis()

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """The library's `Compiled` object, which takes the library's arguments."""
        return self._lowered.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._lowered, name)
