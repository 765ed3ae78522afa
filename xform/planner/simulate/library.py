"""Calls of a library that runs products and reductions, and what is computed within them.

XLA:CPU gives products and large reductions to YNNPACK. The call of a reduction takes in what
is computed around it, as far as the library knows the operations: upwards what nothing else reads,
downwards the only reader. Source: xla/backends/cpu/transforms/library_rewriter.cc and
ynn_support.cc.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from xform._jax import broadcast_in_dim_p, dot_general_p
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import Flat, Step, repeat_p

_POINTWISE = frozenset({
    lax.abs_p, lax.ceil_p, lax.erf_p, lax.exp_p, lax.expm1_p, lax.floor_p, lax.log_p, lax.log1p_p,
    lax.logistic_p, lax.neg_p, lax.rsqrt_p, lax.sign_p, lax.sqrt_p, lax.tanh_p, lax.add_p,
    lax.div_p, lax.max_p, lax.min_p, lax.mul_p, lax.pow_p, lax.sub_p, lax.convert_element_type_p,
})  # fmt: skip
_SINES = frozenset({lax.cos_p, lax.sin_p, lax.tan_p})
_MOVES = frozenset({broadcast_in_dim_p, repeat_p, lax.reshape_p})
_REDUCES = frozenset({lax.reduce_sum_p, lax.reduce_max_p, lax.reduce_min_p})
_TYPES = frozenset(map(jnp.dtype, ("float32", "bfloat16", "int8", "uint8")))


def calls(flat: Flat, steps: Sequence[Step], profile: Profile) -> dict[Step, list[Step]]:
    """The calls of a program: the step whose result each writes, and its steps, that one first.

    `steps` are those of the program in post order.
    """
    work = _Growth(flat, profile)
    for step in reversed(steps):
        if step.does in _REDUCES and step not in work.home and work.knows(step):
            work.grow(step)
        elif step.does is dot_general_p:
            work.home.setdefault(step, {step: None})
    homes = {id(m): m for m in work.home.values() if len(m) > 1 or next(iter(m)).does in _REDUCES}
    return {work.root[i]: [work.root[i], *(s for s in m if s is not work.root[i])]
            for i, m in homes.items()}  # fmt: skip


class _Growth:
    def __init__(self, flat: Flat, profile: Profile):
        self.outputs, self.least = frozenset(flat.outputs), profile.library
        self.pointwise = _POINTWISE | _SINES if profile.sines else _POINTWISE
        self.home: dict[Step, dict[Step, None]] = {}
        self.root: dict[int, Step] = {}

    def grow(self, start: Step) -> None:
        """A call around a reduction."""
        mine: dict[Step, None] = {start: None}
        self.home[start] = mine
        root = start
        while True:
            before = len(mine)
            seen: set[Step] = {start}
            queue = collections.deque([(s, True) for s in self._above(mine, mine, seen)])
            queue += [(s, False) for s in self._below(root, seen)]
            while queue:
                step, up = queue.popleft()
                if not self.knows(step):
                    continue
                self.home[step] = mine
                if up:
                    queue += [(s, True) for s in self._above(mine, [step], seen, step)]
                else:
                    queue += [(s, False) for s in self._below(step, seen)]
                    root = step
                mine[step] = None
            if len(mine) == before:
                break
        self.root[id(mine)] = root

    def _above(self, mine: dict[Step, None], of: Sequence[Step] | dict[Step, None],
               seen: set[Step], taken: Step | None = None) -> list[Step]:  # fmt: skip
        """What makes the operands of some steps and has no other readers."""
        makers: list[Step] = []
        for c in [c for s in of for c in s.reads]:
            step = c.maker
            if step is None or step in self.home or step in seen or c in self.outputs:
                continue
            if all(r in mine or r is taken for r in c.readers):
                seen.add(step)
                makers.append(step)
        return makers

    def _below(self, step: Step, seen: set[Step]) -> list[Step]:
        """The only reader of a step."""
        cell = step.makes[0]
        if cell in self.outputs or len(cell.readers) != 1:
            return []
        (reader,) = cell.readers
        if reader in self.home or reader in seen:
            return []
        seen.add(reader)
        return [reader]

    def knows(self, step: Step) -> bool:
        """Whether the library does what a step does, and is preferred for its size."""
        if len(step.makes) != 1 or not all(map(_typed, step.eqn.invars)):
            return False
        if not _typed(step.eqn.outvars[0]):
            return False
        if step.does in _MOVES:
            return True
        if step.does is dot_general_p:
            return _matrices(step)
        large = any(math.prod(c.shape) >= self.least for c in (*step.reads, *step.makes))
        return large and (step.does in self.pointwise or step.does in _REDUCES)


def _typed(v: object) -> bool:
    return getattr(getattr(v, "aval", None), "dtype", None) in _TYPES


def _matrices(step: Step) -> bool:
    """Whether a product is one of matrices, not by columns of the left one, and not tiny."""
    rows, inner, columns = _sizes(step)
    return step.by_rows and 1 not in (rows, columns) and max(rows, inner, columns) >= 8


def _sizes(step: Step) -> tuple[int, int, int]:
    (left, _), (batch, _) = step.eqn.params["dimension_numbers"]
    a, b = (v.aval.shape for v in step.eqn.invars)  # pyright: ignore[reportAttributeAccessIssue]
    inner = math.prod(a[i] for i in left)
    outer = math.prod(a[i] for i in batch)
    return math.prod(a) // max(1, inner * outer), inner, math.prod(b) // max(1, inner * outer)
