"""The value and the gradient of a loss, as a step that `xform.jit` plans and compiles."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from xform.introspection.argnums import numbers, positions
from xform.introspection.callables import record_transform
from xform.introspection.modules import (
    arguments_for_jit,
    is_array_or_type,
    is_nnx_object,
    take_static_out,
)
from xform.memory.analysis import subject_of
from xform.memory.report import MemoryReport
from xform.modules import with_arrays
from xform.modules.loss_call import LossCall
from xform.policies import parse
from xform.steps.jit import JitStep
from xform.steps.planned import LoweredStep
from xform.steps.step import TrainingStep
from xform.storage.bounded_cache import BoundedCache
from xform.transforms.function import Tree
from xform.transforms.reverse import value_and_grad


class GradientStep(TrainingStep):
    """The value and the gradient of a loss, as a step.

    The arguments may be modules of Flax NNX or Equinox, and may hold values that are not arrays.

    Args:
      loss: the loss, as for `xform.value_and_grad`.
      argnums: as for `xform.value_and_grad`, or an `nnx.DiffState`.
      donate_argnums: positions of the arguments whose memory may be reused.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        argnums: Any = 0,
        donate_argnums: int | Sequence[int] = (),
    ):
        gradient = _gradient(loss, argnums)
        functools.update_wrapper(self, gradient)
        self._loss, self._argnums, self._gradient = loss, argnums, gradient
        self._donate = numbers(donate_argnums, "compare", "donate_argnums")
        self._policy: Any = None
        self._target: str | None = None
        self._verify = True
        # Steps of arrays, each with the values whose identities are in its key.
        self._steps: dict[Hashable, tuple[JitStep, Any]] = BoundedCache(4)

    def __call__(self, *args: Tree) -> Any:
        """Return the value and the gradient, under the default policy."""
        return self._gradient(*args)

    def under(self, policy: Any, target: str | None = None, verify: bool = True) -> GradientStep:
        """Return this step under another policy, or for other devices, see `TrainingStep.under`."""
        other = copy.copy(self)
        other._policy = self._policy if policy is None else parse(policy)
        other._target, other._verify = target or self._target, verify
        return other

    def lower(self, *args: Tree) -> LoweredStep:
        """Plan for arrays or types; return the lowered step, which has the plan and a report."""
        step, arrays = self._of_arrays(args)
        return step.under(self._policy, self._target, self._verify).lower(*arrays)

    def report_for(
        self, target: str | None, args: Sequence[Tree], kwargs: Mapping[str, Tree]
    ) -> MemoryReport:
        """Return the memory report of the step, planned and compiled for a target."""
        report = super().report_for(target, args, kwargs)
        planned, subject = report.description, subject_of(self, args, kwargs)
        description = dataclasses.replace(
            subject["description"],
            policy=planned.policy,
            code=planned.code.replace("(f", "(xform.value_and_grad(f)", 1),
            planned=planned.planned,
        )
        return dataclasses.replace(report, shapes=subject["shapes"], description=description)

    def _of_arrays(self, args: Sequence[Tree]) -> tuple[JitStep, Sequence[Tree]]:
        """Return the step as a function of arrays, and its arguments."""
        donate = positions(self._donate, len(args), "compare")
        call = LossCall(self._loss, args, self._argnums, donate=donate)
        call = with_arrays(call, "value_and_grad")
        gradient = _gradient(call.f, call.argnums, call.has_aux)
        f, arrays, _ = take_static_out(*arguments_for_jit(gradient, call.args, {}))
        leaves, tree = jax.tree.flatten(args, is_leaf=is_nnx_object)
        others = [x for x in leaves if not is_array_or_type(x)]
        key = tree, tuple(0 if is_array_or_type(x) else id(x) for x in leaves)
        if key not in self._steps:
            step = JitStep(f, None, {"donate_argnums": call.donate})
            self._steps[key] = step, others
        return self._steps[key][0], arrays


def _gradient(loss: Callable[..., Any], argnums: Any, has_aux: bool = False) -> Callable[..., Any]:
    """Return the function that computes a loss and its gradient."""

    @functools.wraps(loss)
    def gradient(*args: Tree) -> Any:
        call = with_arrays(LossCall(loss, args, argnums, has_aux), "value_and_grad")
        return value_and_grad(call.f, call.argnums, call.has_aux)(*call.args)

    position = lambda x: getattr(x, "argnum", x)  # of an `nnx.DiffState`
    several = isinstance(argnums, Sequence)
    at = tuple(map(position, argnums)) if several else position(argnums)
    record_transform(gradient, "value_and_grad", at, None)
    return gradient
