"""Linear algebra: products of matrices, and solves with structured matrices.

Factorizations are in `rules.factor` and `rules.eigen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, jax_primitives, zeros
from xform.interpret import cost
from xform.interpret.cost import shape
from xform.interpret.pullback import pullback
from xform.program.arithmetic import Value, instantiate
from xform.program.ir import Mask, apply, trace
from xform.registry.dependence import AxisLink, Links, axis_by_axis
from xform.registry.table import Rule, declare
from xform.registry.traits import Traits

HIGHEST = lax.Precision.HIGHEST


def dot(a: Any, b: Any) -> Any:
    """Return the matrix product over the last two axes."""
    batch = tuple(range(a.ndim - 2))
    dims = ((a.ndim - 1,), (b.ndim - 2,)), (batch, batch)
    return lax.dot_general(a, b, dims, precision=HIGHEST)


def transposed(a: Any) -> Any:
    return lax.transpose(a, (*range(a.ndim - 2), a.ndim - 1, a.ndim - 2))


def adjoint(a: Any) -> Any:
    return transposed(lax.conj(a) if np.iscomplexobj(a) else a)


def where(mask: np.ndarray, a: Any) -> Any:
    """Keep the entries of matrices where a static mask of the last two axes is True, else zero."""
    spread = lax.broadcast_in_dim(mask, a.shape, (a.ndim - 2, a.ndim - 1))
    return lax.select(spread, a, zeros(jax.typeof(a)))


def lower(a: Any, below: int = 0) -> Any:
    """Return the lower triangle, from the diagonal or from `below` diagonals under it."""
    return where(np.tri(*a.shape[-2:], k=-below, dtype=bool), a)


def upper(a: Any) -> Any:
    return where(~np.tri(*a.shape[-2:], k=-1, dtype=bool), a)


def diagonal(a: Any) -> Any:
    """Return the diagonals of matrices as vectors."""
    k = min(a.shape[-2:])
    square = lax.slice(a, (0,) * a.ndim, (*a.shape[:-2], k, k))
    return lax.reduce_sum(where(np.eye(k, dtype=bool), square), (a.ndim - 1,))


def rows(s: Any, like: Any) -> Any:
    """Return `result[..., i, j] = s[..., i]`, in the shape and dtype of `like`."""
    s = lax.convert_element_type(s, like.dtype)
    return lax.broadcast_in_dim(s, like.shape, tuple(range(like.ndim - 1)))


def columns(s: Any, like: Any) -> Any:
    """Return `result[..., i, j] = s[..., j]`, in the shape and dtype of `like`."""
    s = lax.convert_element_type(s, like.dtype)
    return lax.broadcast_in_dim(s, like.shape, (*range(like.ndim - 2), like.ndim - 1))


def eye(a: Any) -> Any:
    """Return identity matrices in the shape and dtype of `a`."""
    unit = np.eye(*a.shape[-2:], dtype=a.dtype)
    return lax.broadcast_in_dim(unit, a.shape, (a.ndim - 2, a.ndim - 1))


def hermitian(a: Any, from_lower: bool) -> Any:
    """Return the Hermitian matrix with one triangle of `a` and the real part of its diagonal."""
    n = a.shape[-1]
    half = where(np.tri(n, k=-1, dtype=bool) if from_lower else ~np.tri(n, dtype=bool), a)
    middle = where(np.eye(n, dtype=bool), a)
    if np.iscomplexobj(a):
        middle = lax.complex(lax.real(middle), zeros(jax.typeof(lax.real(middle))))
    return lax.add(lax.add(half, adjoint(half)), middle)


def imaginary(a: Any) -> Any:
    """Return the imaginary part as a complex array."""
    return lax.complex(zeros(jax.typeof(lax.real(a))), lax.imag(a))


def take_rows(a: Any, permutation: Any) -> Any:
    """Return `result[..., i, :] = a[..., permutation[..., i], :]`."""
    i = a.ndim - 2
    batch = tuple(range(i))
    return lax.gather(
        a,
        lax.expand_dims(permutation, (i + 1,)),
        lax.GatherDimensionNumbers((i + 1,), (i,), (i,), batch, batch),
        (*(1,) * (i + 1), a.shape[-1]),
        unique_indices=True,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


# Solves. `A y = b` gives `A dy = db - dA y`: one rule for all structures of A.


class Solve(Rule):
    """The rule of a solve. The last input is the right-hand side `b`; the others hold `A`.

    The formulas are `apply(y, *a)`, the product A y, and `transpose(ct, *a)`, the solve with the
    transpose of A.
    """

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        *a, _ = xs
        *da, db = dxs
        if any(d is not None for d in da):
            moved = self.call(self.formulas[0], eqn, ys[0], *instantiate(da, map(jax.typeof, a)))
            db = lax.neg(moved) if db is None else lax.sub(db, moved)
        return apply(eqn, [*a, db])

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        *a, _ = xs
        ct_b = self.call(self.formulas[1], eqn, cts[0], *a)
        ct_a: list[Value] = [None] * len(a)
        if any(active[:-1]):
            moved = lambda *da: [self.call(self.formulas[0], eqn, ys[0], *da)]
            _, pull = pullback(trace(moved, *a), active[:-1], (True,), a)
            ct_a = pull([lax.neg(ct_b)])
        return [*ct_a, ct_b if active[-1] else None]


def _triangular_apply(y: Any, a: Any, *, left_side: bool, lower: bool, transpose_a: bool,
                      conjugate_a: bool, unit_diagonal: bool):  # fmt: skip
    n = a.shape[-1]
    kept = np.tri(n, k=-1 if unit_diagonal else 0, dtype=bool)
    a = where(kept if lower else kept.T, a)
    if conjugate_a and np.iscomplexobj(a):
        a = lax.conj(a)
    if transpose_a:
        a = transposed(a)
    return dot(a, y) if left_side else dot(y, a)


def _triangular_transpose(ct: Any, a: Any, *, left_side: bool, lower: bool, transpose_a: bool,
                          conjugate_a: bool, unit_diagonal: bool):  # fmt: skip
    return jax.lax.linalg.triangular_solve(
        a,
        ct,
        left_side=left_side,
        lower=lower,
        transpose_a=not transpose_a,
        conjugate_a=conjugate_a,
        unit_diagonal=unit_diagonal,
    )


def _tridiagonal_apply(y: Any, low: Any, middle: Any, high: Any, *, perturb_singular: Any = None):
    """Return A y. `low` couples a row to the one above (low[0] is unused), `high` to that below."""
    axis = y.ndim - 2
    after = [(0, 0, 0)] * y.ndim
    before = list(after)
    after[axis], before[axis] = (-1, 1, 0), (1, -1, 0)
    zero = np.zeros((), y.dtype)
    return lax.add(
        lax.mul(rows(middle, y), y),
        lax.add(
            lax.mul(rows(low, y), lax.pad(y, zero, before)),
            lax.mul(rows(high, y), lax.pad(y, zero, after)),
        ),
    )


def _tridiagonal_transpose(ct: Any, low: Any, middle: Any, high: Any, *, perturb_singular: Any):
    shift = lambda v, by: lax.pad(
        v, np.zeros((), v.dtype), [*[(0, 0, 0)] * (v.ndim - 1), (by, -by, 0)]
    )
    return jax_primitives.tridiagonal_solve_p.bind(
        shift(high, 1), middle, shift(low, -1), ct, perturb_singular=perturb_singular
    )


def _substitutions(eqn: JaxprEqn) -> int:
    return cost.size(eqn.invars[1]) * cost.shape(eqn.invars[0])[-1]


def _solve_dependence(eqn: JaxprEqn) -> list[list[Links]]:
    """Link an output to all of its matrix, and to its column (row, if solved from the right)."""
    ndim = len(shape(eqn.outvars[0]))
    batch = tuple(map(AxisLink, range(ndim - 2)))
    own = (
        (None, AxisLink(ndim - 1))
        if eqn.params.get("left_side", True)
        else (AxisLink(ndim - 2), None)
    )
    whole: Links = (*batch, None, None)
    return [*[[whole] for _ in eqn.invars[1:]], [(*batch, *own)]]


declare(Solve, "triangular_solve", "solve", [_triangular_apply, _triangular_transpose],
        Traits(flops=_substitutions, dependence=axis_by_axis(_solve_dependence)))  # fmt: skip
declare(Solve, "tridiagonal_solve", "solve", [_tridiagonal_apply, _tridiagonal_transpose],
        Traits(dependence=axis_by_axis(_solve_dependence)))  # fmt: skip


def solve_left(a: Any, b: Any, **kind: bool) -> Any:
    """Return a⁻¹ b for a triangular `a`."""
    return jax.lax.linalg.triangular_solve(a, b, left_side=True, **kind)


def solve_right(a: Any, b: Any, **kind: bool) -> Any:
    """Return b a⁻¹ for a triangular `a`."""
    return jax.lax.linalg.triangular_solve(a, b, left_side=False, **kind)


def solve(a: Any, b: Any) -> Any:
    """Return a⁻¹ b for any square `a`."""
    factors, _, permutation = jax.lax.linalg.lu(a)
    x = solve_left(factors, take_rows(b, permutation), lower=True, unit_diagonal=True)
    return solve_left(factors, x, lower=False)
