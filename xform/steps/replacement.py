"""A function that takes the place of `jax.jit`, so that each outermost step keeps a budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from xform._jax import jit as jit_of_jax
from xform.steps.call import StepCall
from xform.steps.jit import JitStep
from xform.steps.planned import PlannedStep
from xform.steps.step_plan import StepPlan


def planning_jit(
    policy: Any, notify: Callable[[StepPlan], None] = lambda plan: None
) -> Callable[..., Any]:
    """Return a function that takes the place of `jax.jit` and plans each outermost step.

    Unlike `xform.jit`, it runs a step that takes no derivative whatever its bytes are, and it gives
    no warning inside another transformation.

    Args:
      policy: a policy that `bounds_peak`.
      notify: called with each new plan of a step that takes a derivative.
    """

    @functools.wraps(jit_of_jax)
    def planned(fun: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        if fun is None:
            return functools.partial(planned, **options)
        if not callable(fun):
            return jit_of_jax(fun, **options)  # raises JAX's error
        return _UnmodifiedStep(fun, policy, options, notify)

    planned.__module__ = "jax"  # so that pickle finds it
    return planned


class _UnmodifiedStep(JitStep):
    """A jitted function of a program that does not know of xform."""

    _is_declared = False
    _limits_every_step = False

    def __init__(
        self,
        step: Callable[..., Any],
        policy: Any,
        options: Mapping[str, Any],
        notify: Callable[[StepPlan], None],
    ):
        super().__init__(step, policy, options)
        self._notify = notify

    def _decide(self, call: StepCall) -> PlannedStep:
        planned = super()._decide(call)
        if planned.chosen.candidates:
            self._notify(planned.plan)
        return planned

    def _warn_of_outer_trace(self) -> None:
        """Give no warning: the user did not choose the functions that are jitted."""
