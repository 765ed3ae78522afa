"""Predict which operations XLA:CPU runs in one call of its library YNNPACK.

Matrix products and large reductions run in the library. The call for a reduction grows by
neighbouring operations that the library supports. A neighbour either makes an operand that nothing
outside the call reads, or is the only reader of the call's result. The added operations may have
neighbours too, so this repeats until none is left.
Source: xla/backends/cpu/transforms/library_rewriter.cc and ynn_support.cc.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
from jax import lax

from xform._jax import broadcast_in_dim_p, dot_general_p
from xform.planner.simulate.products import shape
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import FlatProgram, FlatStep, repeat_p

# The operations that the library supports. Sines only in some versions (`Profile.library_sines`).
_ELEMENTWISE = frozenset({
    lax.abs_p, lax.ceil_p, lax.erf_p, lax.exp_p, lax.expm1_p, lax.floor_p, lax.log_p, lax.log1p_p,
    lax.logistic_p, lax.neg_p, lax.rsqrt_p, lax.sign_p, lax.sqrt_p, lax.tanh_p, lax.add_p,
    lax.div_p, lax.max_p, lax.min_p, lax.mul_p, lax.pow_p, lax.sub_p, lax.convert_element_type_p,
})  # fmt: skip
_SINES = frozenset({lax.cos_p, lax.sin_p, lax.tan_p})
_MOVEMENTS = frozenset({broadcast_in_dim_p, repeat_p, lax.reshape_p})
_REDUCTIONS = frozenset({lax.reduce_sum_p, lax.reduce_max_p, lax.reduce_min_p})
_DTYPES = frozenset(map(jnp.dtype, ("float32", "bfloat16", "int8", "uint8")))


def library_calls(
    flat: FlatProgram, steps: Sequence[FlatStep], profile: Profile
) -> dict[FlatStep, list[FlatStep]]:
    """Return the library calls of a program, each as the steps that it includes.

    `steps` are all steps of `flat`, each after the steps that make its operands. The result maps
    the root of a call, the step whose result the call writes, to all steps of the call, the root
    first. A product that the library runs alone is not listed.
    """
    calls = _LibraryFusion(flat, profile)
    for step in reversed(steps):
        if step.primitive in _REDUCTIONS and step not in calls.members and calls.supports(step):
            calls.add_call(step)
        elif step.primitive is dot_general_p:
            calls.members.setdefault(step, {step: None})
    listed = {
        id(m): m
        for m in calls.members.values()
        if len(m) > 1 or next(iter(m)).primitive in _REDUCTIONS
    }
    return {calls.root[i]: [calls.root[i], *(s for s in m if s is not calls.root[i])]
            for i, m in listed.items()}  # fmt: skip


class _LibraryFusion:
    """Makes library calls by adding neighbours to reductions.

    Attributes:
      members: for each step that is in a call, the dictionary of all steps of that call. All
        steps of a call share this dictionary.
      root: the step whose result a call writes, by the `id` of the call's dictionary.
    """

    def __init__(self, flat: FlatProgram, profile: Profile):
        self._outputs, self._least_elements = frozenset(flat.outputs), profile.library_elements
        self._elementwise = _ELEMENTWISE | (_SINES if profile.library_sines else frozenset())
        self.members: dict[FlatStep, dict[FlatStep, None]] = {}
        self.root: dict[int, FlatStep] = {}

    def add_call(self, reduction: FlatStep) -> None:
        """Make a call of a reduction, and add neighbours until none can be added."""
        members: dict[FlatStep, None] = {reduction: None}
        self.members[reduction] = members
        root = reduction
        while True:
            n_members = len(members)
            seen: set[FlatStep] = {reduction}
            # Neighbours to try. The bool is True if the neighbour makes an operand of the call, and
            # False if it reads the result.
            queue = collections.deque([(s, True) for s in self._makers(members, members, seen)])
            queue += [(s, False) for s in self._only_reader(root, seen)]
            while queue:
                step, is_maker = queue.popleft()
                if not self.supports(step):
                    continue
                self.members[step] = members
                if is_maker:
                    queue += [(s, True) for s in self._makers(members, [step], seen, step)]
                else:
                    queue += [(s, False) for s in self._only_reader(step, seen)]
                    root = step
                members[step] = None
            if len(members) == n_members:
                break
        self.root[id(members)] = root

    def _makers(
        self,
        members: dict[FlatStep, None],
        steps: Iterable[FlatStep],
        seen: set[FlatStep],
        new: FlatStep | None = None,
    ) -> list[FlatStep]:
        """Return the steps that make an operand of `steps` that nothing outside the call reads.

        The call consists of `members` and the step `new`. Steps in `seen` or in any call are not
        returned. The returned steps are added to `seen`.
        """
        makers: list[FlatStep] = []
        for value in [x for s in steps for x in s.operands]:
            step = value.maker
            if step is None or step in self.members or step in seen or value in self._outputs:
                continue
            if all(r in members or r is new for r in value.readers):
                seen.add(step)
                makers.append(step)
        return makers

    def _only_reader(self, step: FlatStep, seen: set[FlatStep]) -> list[FlatStep]:
        """Return a list with the only reader of a step's result, or [] if others read it too.

        A reader in `seen` or in any call is not returned. The returned step is added to `seen`.
        """
        value = step.results[0]
        if value in self._outputs or len(value.readers) != 1:
            return []
        (reader,) = value.readers
        if reader in self.members or reader in seen:
            return []
        seen.add(reader)
        return [reader]

    def supports(self, step: FlatStep) -> bool:
        """Return whether the library supports a step and XLA uses it for values of this size."""
        if len(step.results) != 1 or not all(map(_has_library_dtype, step.eqn.invars)):
            return False
        if not _has_library_dtype(step.eqn.outvars[0]):
            return False
        if step.primitive in _MOVEMENTS:
            return True
        if step.primitive is dot_general_p:
            return _supports_product(step)
        n_elements = max(math.prod(x.shape) for x in (*step.operands, *step.results))
        is_supported = step.primitive in self._elementwise or step.primitive in _REDUCTIONS
        return n_elements >= self._least_elements and is_supported


def _has_library_dtype(v: object) -> bool:
    """Return whether the library has the dtype of a variable or literal of an equation."""
    return getattr(getattr(v, "aval", None), "dtype", None) in _DTYPES


def _supports_product(step: FlatStep) -> bool:
    """Return whether the library runs a product.

    The product must have several rows, several columns, and at least 8 rows, columns or summed
    elements. It must sum over the last axis of its left operand.
    """
    rows, n_summed, columns = _product_sizes(step)
    is_large = 1 not in (rows, columns) and max(rows, n_summed, columns) >= 8
    return step.left_sums_last_axis and is_large


def _product_sizes(step: FlatStep) -> tuple[int, int, int]:
    """Return the rows, summed elements and columns of a product."""
    (summed, _), (batch, _) = step.eqn.params["dimension_numbers"]
    a, b = (shape(v.aval) for v in step.eqn.invars)
    n_summed = math.prod(a[i] for i in summed)
    n_products = math.prod(a[i] for i in batch)
    rows, columns = (math.prod(x) // max(1, n_summed * n_products) for x in (a, b))
    return rows, n_summed, columns
