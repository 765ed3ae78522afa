"""The value and the gradient of a loss, as a step that `xform.jit` plans and compiles."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xform.introspection.argnums import numbers, positions
from xform.introspection.callables import record_transform
from xform.memory.report import MemoryReport
from xform.modules import with_arrays
from xform.modules.loss_call import LossCall
from xform.steps.function import FunctionStep
from xform.transforms.function import Tree
from xform.transforms.reverse import value_and_grad


class GradientStep(FunctionStep):
    """The value and the gradient of a loss, as a step.

    Args:
      loss: the loss, as for `xform.value_and_grad`, or of modules of Flax NNX.
      argnums: as for `xform.value_and_grad`, or an `nnx.DiffState`.
      donate_argnums: positions of the arguments whose memory may be reused.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        argnums: Any = 0,
        donate_argnums: int | Sequence[int] = (),
    ):
        donate = numbers(donate_argnums, "compare", "donate_argnums")
        super().__init__(_gradient(loss, argnums), donate)
        self._loss, self._argnums = loss, argnums

    def report_for(
        self, target: str | None, args: Sequence[Tree], kwargs: Mapping[str, Tree]
    ) -> MemoryReport:
        """Return the memory report of the step, planned and compiled for a target."""
        report = super().report_for(target, args, kwargs)
        code = report.description.code.replace("(f", "(xform.value_and_grad(f)", 1)
        description = dataclasses.replace(report.description, code=code)
        return dataclasses.replace(report, description=description)

    def _pure(
        self, args: Sequence[Tree]
    ) -> tuple[Callable[..., Any], Sequence[Tree], Sequence[int]]:
        donate = positions(self._donate, len(args), "compare")
        call = LossCall(self._loss, args, self._argnums, donate=donate)
        call = with_arrays(call, "value_and_grad")
        return _gradient(call.f, call.argnums, call.has_aux), call.args, call.donate


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
