"""`FunctionStep`: a function of any arguments as a step that `xform.jit` plans and compiles."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from xform.introspection.modules import (
    arguments_for_jit,
    is_array_or_type,
    is_nnx_object,
    take_static_out,
)
from xform.policies import parse
from xform.steps.jit import JitStep
from xform.steps.planned import LoweredStep
from xform.steps.step import TrainingStep
from xform.storage.bounded_cache import BoundedCache

Tree = Any


class FunctionStep(TrainingStep):
    """A function as a step. Its arguments may be modules, and hold values that are not arrays.

    Args:
      f: the function.
      donate_argnums: positions of the arguments whose memory may be reused.
    """

    def __init__(self, f: Callable[..., Any], donate_argnums: Sequence[int] = ()):
        functools.update_wrapper(self, f)
        self._f, self._donate = f, tuple(donate_argnums)
        self._policy: Any = None
        self._target: str | None = None
        self._verify = True
        # Steps of arrays, each with the values whose identities are in its key.
        self._steps: dict[Hashable, tuple[JitStep, Any]] = BoundedCache(4)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Any:
        """Call the function, under the default policy."""
        return self._f(*args, **kwargs)

    def under(self, policy: Any, target: str | None = None, verify: bool = True) -> Any:
        """Return this step under another policy, or for other devices, see `TrainingStep.under`."""
        other = copy.copy(self)
        other._policy = self._policy if policy is None else parse(policy)
        other._target, other._verify = target or self._target, verify
        return other

    def donating(self, donate_argnums: Sequence[int]) -> FunctionStep:
        """Return this step with other donated arguments."""
        other = copy.copy(self)
        other._donate = tuple(donate_argnums)
        return other

    def lower(self, *args: Tree, **kwargs: Tree) -> LoweredStep:
        """Plan for arrays or types; return the lowered step, which has the plan and a report."""
        f, given, donate = self._pure(args)
        f, arrays, named = take_static_out(*arguments_for_jit(f, given, kwargs))
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_nnx_object)
        others = [x for x in leaves if not is_array_or_type(x)]
        key = tree, donate, tuple(0 if is_array_or_type(x) else id(x) for x in leaves)
        if key not in self._steps:
            self._steps[key] = JitStep(f, None, {"donate_argnums": donate}), others
        step, _ = self._steps[key]
        return step.under(self._policy, self._target, self._verify).lower(*arrays, **named)

    def _pure(
        self, args: Sequence[Tree]
    ) -> tuple[Callable[..., Any], Sequence[Tree], Sequence[int]]:
        """Return the function for some arguments, its arguments, and the donated positions."""
        return self._f, args, self._donate
