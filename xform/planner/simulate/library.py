"""Library calls that run products and reductions, and the operations fused into them.

XLA:CPU runs products and large reductions with the library YNNPACK. The call of a reduction
includes neighbouring operations that the library supports: producers whose results nothing else
reads, and the only reader of a result.
Source: xla/backends/cpu/transforms/library_rewriter.cc and ynn_support.cc.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from xform._jax import broadcast_in_dim_p, dot_general_p
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import FlatProgram, FlatStep, repeat_p

_POINTWISE = frozenset({
    lax.abs_p, lax.ceil_p, lax.erf_p, lax.exp_p, lax.expm1_p, lax.floor_p, lax.log_p, lax.log1p_p,
    lax.logistic_p, lax.neg_p, lax.rsqrt_p, lax.sign_p, lax.sqrt_p, lax.tanh_p, lax.add_p,
    lax.div_p, lax.max_p, lax.min_p, lax.mul_p, lax.pow_p, lax.sub_p, lax.convert_element_type_p,
})  # fmt: skip
_SINES = frozenset({lax.cos_p, lax.sin_p, lax.tan_p})
_MOVES = frozenset({broadcast_in_dim_p, repeat_p, lax.reshape_p})
_REDUCES = frozenset({lax.reduce_sum_p, lax.reduce_max_p, lax.reduce_min_p})
_TYPES = frozenset(map(jnp.dtype, ("float32", "bfloat16", "int8", "uint8")))


def library_calls(
    flat: FlatProgram, steps: Sequence[FlatStep], profile: Profile
) -> dict[FlatStep, list[FlatStep]]:
    """Return the library calls of a program, with their steps.

    Each key is the step whose result the call writes. It is also the first of the listed steps.
    `steps` are the steps of the program in post order.
    """
    work = _LibraryFusion(flat, profile)
    for step in reversed(steps):
        if step.primitive in _REDUCES and step not in work.home and work.supports(step):
            work.grow(step)
        elif step.primitive is dot_general_p:
            work.home.setdefault(step, {step: None})
    homes = {
        id(m): m for m in work.home.values() if len(m) > 1 or next(iter(m)).primitive in _REDUCES
    }
    return {work.root[i]: [work.root[i], *(s for s in m if s is not work.root[i])]
            for i, m in homes.items()}  # fmt: skip


class _LibraryFusion:
    """Grows library calls around reductions.

    `home` maps each step to the steps of its call. `root` maps the id of a call's steps to the step
    whose result it writes.
    """

    def __init__(self, flat: FlatProgram, profile: Profile):
        self.outputs, self.least = frozenset(flat.outputs), profile.library_elements
        self.pointwise = _POINTWISE | _SINES if profile.library_sines else _POINTWISE
        self.home: dict[FlatStep, dict[FlatStep, None]] = {}
        self.root: dict[int, FlatStep] = {}

    def grow(self, start: FlatStep) -> None:
        """Make a call of a reduction, and add neighbours until none can be added."""
        members: dict[FlatStep, None] = {start: None}
        self.home[start] = members
        root = start
        while True:
            before = len(members)
            seen: set[FlatStep] = {start}
            queue = collections.deque([(s, True) for s in self._above(members, members, seen)])
            queue += [(s, False) for s in self._below(root, seen)]
            while queue:
                step, up = queue.popleft()
                if not self.supports(step):
                    continue
                self.home[step] = members
                if up:
                    queue += [(s, True) for s in self._above(members, [step], seen, step)]
                else:
                    queue += [(s, False) for s in self._below(step, seen)]
                    root = step
                members[step] = None
            if len(members) == before:
                break
        self.root[id(members)] = root

    def _above(self, members: dict[FlatStep, None], of: Sequence[FlatStep] | dict[FlatStep, None],
               seen: set[FlatStep], new: FlatStep | None = None) -> list[FlatStep]:  # fmt: skip
        """The steps that make operands of the steps `of`, and that only the call reads.

        The call consists of `members` and the step `new`. Adds the found steps to `seen`.
        """
        makers: list[FlatStep] = []
        for c in [c for s in of for c in s.operands]:
            step = c.maker
            if step is None or step in self.home or step in seen or c in self.outputs:
                continue
            if all(r in members or r is new for r in c.readers):
                seen.add(step)
                makers.append(step)
        return makers

    def _below(self, step: FlatStep, seen: set[FlatStep]) -> list[FlatStep]:
        """The reader of a step, if there is exactly one. Adds it to `seen`."""
        value = step.results[0]
        if value in self.outputs or len(value.readers) != 1:
            return []
        (reader,) = value.readers
        if reader in self.home or reader in seen:
            return []
        seen.add(reader)
        return [reader]

    def supports(self, step: FlatStep) -> bool:
        """Whether the library supports a step, and XLA prefers it for values of this size."""
        if len(step.results) != 1 or not all(map(_has_library_type, step.eqn.invars)):
            return False
        if not _has_library_type(step.eqn.outvars[0]):
            return False
        if step.primitive in _MOVES:
            return True
        if step.primitive is dot_general_p:
            return _matrices(step)
        large = any(math.prod(c.shape) >= self.least for c in (*step.operands, *step.results))
        return large and (step.primitive in self.pointwise or step.primitive in _REDUCES)


def _has_library_type(v: object) -> bool:
    return getattr(getattr(v, "aval", None), "dtype", None) in _TYPES


def _matrices(step: FlatStep) -> bool:
    """Whether the library runs a product: of two matrices, the left one by rows, not tiny."""
    rows, inner, columns = _sizes(step)
    return step.by_rows and 1 not in (rows, columns) and max(rows, inner, columns) >= 8


def _sizes(step: FlatStep) -> tuple[int, int, int]:
    """Rows, summed elements and columns of a product."""
    (left, _), (batch, _) = step.eqn.params["dimension_numbers"]
    a, b = (v.aval.shape for v in step.eqn.invars)  # pyright: ignore[reportAttributeAccessIssue]
    inner = math.prod(a[i] for i in left)
    outer = math.prod(a[i] for i in batch)
    return math.prod(a) // max(1, inner * outer), inner, math.prod(b) // max(1, inner * outer)
