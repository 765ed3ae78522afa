"""Rules of triangular and tridiagonal solves, and operations on matrices for other rules.

The rules of factorizations (`rules.factor`, `rules.eigen`) use these operations: products,
triangles, diagonals. A matrix is the last two axes of an array. All axes before are batch axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, jax_primitives
from xform._jax.symbolic import is_symbolic, smaller
from xform.interpret import cost
from xform.interpret.pullback import pullback
from xform.program.arithmetic import Value, instantiate
from xform.program.arrays import zeros
from xform.program.ir import Mask, apply, trace
from xform.registry.ends import Ends, matrices
from xform.registry.table import Rule, declare
from xform.registry.traits import PLAIN, Traits, with_ends

HIGHEST = lax.Precision.HIGHEST


def dot(a: Any, b: Any) -> Any:
    """Return the matrix product, at the highest precision."""
    batch = tuple(range(a.ndim - 2))
    dims = ((a.ndim - 1,), (b.ndim - 2,)), (batch, batch)
    return lax.dot_general(a, b, dims, precision=HIGHEST)


def transposed(a: Any) -> Any:
    """Return the transposed matrix."""
    return lax.transpose(a, (*range(a.ndim - 2), a.ndim - 1, a.ndim - 2))


def adjoint(a: Any) -> Any:
    """Return the conjugate transpose."""
    return transposed(lax.conj(a) if np.iscomplexobj(a) else a)


def tri(m: Any, n: Any, above: int = 0) -> Any:
    """Return an m x n matrix of bools: the lower triangle, with `above` diagonals above the main.

    It is a constant, unless a size is symbolic.
    """
    if not (is_symbolic(m) or is_symbolic(n)):
        return np.tri(m, n, above, dtype=bool)
    row, column = (lax.broadcasted_iota(np.int32, (m, n), axis) for axis in (0, 1))
    return lax.ge(lax.add(row, np.int32(above)), column)


def identity(m: Any, n: Any) -> Any:
    """Return an m x n matrix of bools that is True on the diagonal."""
    return tri(m, n) & ~tri(m, n, -1)


def where(mask: Any, a: Any) -> Any:
    """Return a matrix with zeros where `mask`, a matrix of bools, is False."""
    full_mask = lax.broadcast_in_dim(mask, a.shape, (a.ndim - 2, a.ndim - 1))
    return lax.select(full_mask, a, zeros(jax.typeof(a)))


def lower(a: Any, below: int = 0) -> Any:
    """Return the lower triangle, without its first `below` diagonals; 0 keeps the diagonal."""
    return where(tri(*a.shape[-2:], above=-below), a)


def upper(a: Any) -> Any:
    """Return the upper triangle with the diagonal."""
    return where(~tri(*a.shape[-2:], above=-1), a)


def diagonal(a: Any) -> Any:
    """Return the diagonal as a vector."""
    k = smaller(*a.shape[-2:])
    square = lax.slice(a, (0,) * a.ndim, (*a.shape[:-2], k, k))
    return lax.reduce_sum(where(identity(k, k), square), (a.ndim - 1,))


def rows(s: Any, like: Any) -> Any:
    """Return `result[..., i, j] = s[..., i]`, in the shape and dtype of `like`."""
    s = lax.convert_element_type(s, like.dtype)
    return lax.broadcast_in_dim(s, like.shape, tuple(range(like.ndim - 1)))


def columns(s: Any, like: Any) -> Any:
    """Return `result[..., i, j] = s[..., j]`, in the shape and dtype of `like`."""
    s = lax.convert_element_type(s, like.dtype)
    return lax.broadcast_in_dim(s, like.shape, (*range(like.ndim - 2), like.ndim - 1))


def eye(a: Any) -> Any:
    """Return the identity matrix in the shape and dtype of `a`, which may not be square."""
    unit = identity(*a.shape[-2:]).astype(a.dtype)
    return lax.broadcast_in_dim(unit, a.shape, (a.ndim - 2, a.ndim - 1))


def hermitian(a: Any, from_lower: bool) -> Any:
    """Return the Hermitian matrix with one triangle of `a` and the real part of its diagonal.

    `from_lower`: whether to take the lower triangle; else the upper one.
    """
    n = a.shape[-1]
    triangle = where(tri(n, n, -1) if from_lower else ~tri(n, n), a)
    on_diagonal = where(identity(n, n), a)
    if np.iscomplexobj(a):
        real = lax.real(on_diagonal)
        on_diagonal = lax.complex(real, zeros(jax.typeof(real)))
    return lax.add(lax.add(triangle, adjoint(triangle)), on_diagonal)


def imaginary(a: Any) -> Any:
    """Return the imaginary part of a complex array as a complex array, i times the part."""
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


# Solves. A y = b gives A dy = db - dA y, whatever the structure of A. So all solves share one rule.


class Solve(Rule):
    """The rule of a solve. The last input is the right-hand side `b`; the others define `A`.

    There are two formulas. `apply(y, *a)` returns the product A y. `transpose(ct, *a)` returns the
    solution for the transpose of A and the right-hand side `ct`.
    """

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        *a, _ = xs
        *da, db = dxs
        if any(d is not None for d in da):
            da_y = self.call(self.formulas[0], eqn, ys[0], *instantiate(da, map(jax.typeof, a)))
            db = lax.neg(da_y) if db is None else lax.sub(db, da_y)
        return apply(eqn, [*a, db])

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        *a, _ = xs
        ct_b = self.call(self.formulas[1], eqn, cts[0], *a)
        ct_a: list[Value] = [None] * len(a)
        if any(active[:-1]):
            a_times_y = lambda *a: [self.call(self.formulas[0], eqn, ys[0], *a)]
            _, pull = pullback(trace(a_times_y, *a), active[:-1], (True,), a)
            ct_a = pull([lax.neg(ct_b)])
        return [*ct_a, ct_b if active[-1] else None]


def _triangular_apply(y: Any, a: Any, *, left_side: bool, lower: bool, transpose_a: bool,
                      conjugate_a: bool, unit_diagonal: bool):  # fmt: skip
    """Return A y, or y A if not `left_side`. The options say which triangular matrix A is."""
    n = a.shape[-1]
    below = int(unit_diagonal)
    a = where(tri(n, n, -below) if lower else ~tri(n, n, below - 1), a)
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
    """Return A y for a tridiagonal A: row i is low[i] y[i-1] + middle[i] y[i] + high[i] y[i+1].

    The first element of `low` and the last one of `high` are not used.
    """
    axis = y.ndim - 2
    to_next = [(0, 0, 0)] * y.ndim
    to_previous = list(to_next)
    to_next[axis], to_previous[axis] = (-1, 1, 0), (1, -1, 0)
    zero = np.zeros((), y.dtype)
    return lax.add(
        lax.mul(rows(middle, y), y),
        lax.add(
            lax.mul(rows(low, y), lax.pad(y, zero, to_previous)),
            lax.mul(rows(high, y), lax.pad(y, zero, to_next)),
        ),
    )


def _tridiagonal_transpose(ct: Any, low: Any, middle: Any, high: Any, *, perturb_singular: Any):
    shift = lambda v, by: lax.pad(
        v, np.zeros((), v.dtype), [*[(0, 0, 0)] * (v.ndim - 1), (by, -by, 0)]
    )
    return jax_primitives.tridiagonal_solve_p.bind(
        shift(high, 1), middle, shift(low, -1), ct, perturb_singular=perturb_singular
    )


def _triangular_flops(eqn: JaxprEqn) -> int:
    return cost.size(eqn.invars[1]) * cost.sizes(eqn.invars[0])[-1]


def _solve_ends(eqn: JaxprEqn) -> list[Ends]:
    """The batch axes stay, and the columns of `b`, or its rows if not `left_side`."""
    *factors, b = matrices(eqn)
    axis = len(b) - (1 if eqn.params.get("left_side", True) else 2)
    return [*factors, tuple(i if i == axis else end for i, end in enumerate(b))]


declare(Solve, "triangular_solve", "solve", [_triangular_apply, _triangular_transpose],
        with_ends(Traits(flops=_triangular_flops), _solve_ends))  # fmt: skip
declare(Solve, "tridiagonal_solve", "solve", [_tridiagonal_apply, _tridiagonal_transpose],
        with_ends(PLAIN, _solve_ends))  # fmt: skip


def solve_left(a: Any, b: Any, **options: bool) -> Any:
    """Return a⁻¹ b for a triangular `a`. The options are those of `triangular_solve`."""
    return jax.lax.linalg.triangular_solve(a, b, left_side=True, **options)


def solve_right(a: Any, b: Any, **options: bool) -> Any:
    """Return b a⁻¹ for a triangular `a`. The options are those of `triangular_solve`."""
    return jax.lax.linalg.triangular_solve(a, b, left_side=False, **options)


def solve(a: Any, b: Any) -> Any:
    """Return a⁻¹ b for any square `a`."""
    factors, _, permutation = jax.lax.linalg.lu(a)
    x = solve_left(factors, take_rows(b, permutation), lower=True, unit_diagonal=True)
    return solve_left(factors, x, lower=False)
