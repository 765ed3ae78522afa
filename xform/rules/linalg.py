"""Linear algebra: solves with structured matrices, and factorizations.

Factorizations are differentiated where they are smooth: distinct eigenvalues and singular values,
full rank. There the phases of complex eigenvectors and singular vectors are JAX's choice. Of a
symmetric input only the triangle that the primitive reads has a derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import JaxprEqn, jax_primitives, zeros
from xform.errors import UnsupportedParam
from xform.interpret.pullback import pullback
from xform.ir import Mask, bind, trace
from xform.table import Rule, Value, composite, constant, declare

HIGHEST = lax.Precision.HIGHEST


def dot(a: Any, b: Any) -> Any:
    """Matrix product of the last two axes."""
    batch = tuple(range(a.ndim - 2))
    dims = ((a.ndim - 1,), (b.ndim - 2,)), (batch, batch)
    return lax.dot_general(a, b, dims, precision=HIGHEST)


def transposed(a: Any) -> Any:
    return lax.transpose(a, (*range(a.ndim - 2), a.ndim - 1, a.ndim - 2))


def adjoint(a: Any) -> Any:
    return transposed(lax.conj(a) if np.iscomplexobj(a) else a)


def where(mask: np.ndarray, a: Any) -> Any:
    """The entries of matrices that a static mask of the last two axes keeps, zero elsewhere."""
    spread = lax.broadcast_in_dim(mask, a.shape, (a.ndim - 2, a.ndim - 1))
    return lax.select(spread, a, zeros(jax.typeof(a)))


def lower(a: Any, below: int = 0) -> Any:
    """The lower triangle, from the diagonal or from `below` it."""
    return where(np.tri(*a.shape[-2:], k=-below, dtype=bool), a)


def upper(a: Any) -> Any:
    return where(~np.tri(*a.shape[-2:], k=-1, dtype=bool), a)


def diagonal(a: Any) -> Any:
    """The diagonals of matrices, as vectors."""
    k = min(a.shape[-2:])
    square = lax.slice(a, (0,) * a.ndim, (*a.shape[:-2], k, k))
    return lax.reduce_sum(where(np.eye(k, dtype=bool), square), (a.ndim - 1,))


def rows(s: Any, like: Any) -> Any:
    """`result[..., i, j] = s[..., i]`, in the shape and dtype of `like`."""
    s = lax.convert_element_type(s, like.dtype)
    return lax.broadcast_in_dim(s, like.shape, tuple(range(like.ndim - 1)))


def columns(s: Any, like: Any) -> Any:
    """`result[..., i, j] = s[..., j]`, in the shape and dtype of `like`."""
    s = lax.convert_element_type(s, like.dtype)
    return lax.broadcast_in_dim(s, like.shape, (*range(like.ndim - 2), like.ndim - 1))


def eye(a: Any) -> Any:
    """Identity matrices in the shape and dtype of `a`."""
    unit = np.eye(*a.shape[-2:], dtype=a.dtype)
    return lax.broadcast_in_dim(unit, a.shape, (a.ndim - 2, a.ndim - 1))


def hermitian(a: Any, from_lower: bool) -> Any:
    """The Hermitian matrix that has one triangle of `a`, and the real part of its diagonal."""
    n = a.shape[-1]
    half = where(np.tri(n, k=-1, dtype=bool) if from_lower else ~np.tri(n, dtype=bool), a)
    middle = where(np.eye(n, dtype=bool), a)
    if np.iscomplexobj(a):
        middle = lax.complex(lax.real(middle), zeros(jax.typeof(lax.real(middle))))
    return lax.add(lax.add(half, adjoint(half)), middle)


def imaginary(a: Any) -> Any:
    """The imaginary part, as a complex array."""
    return lax.complex(zeros(jax.typeof(lax.real(a))), lax.imag(a))


def take_rows(a: Any, permutation: Any) -> Any:
    """`result[..., i, :] = a[..., permutation[..., i], :]`."""
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


def unsupported(name: str, what: str) -> UnsupportedParam:
    return UnsupportedParam(
        f"derivative of {name}",
        f"{what} has no derivative rule",
        "",
        "compute the thin, whole factorization, or declare a rule with jax.custom_jvp",
    )


def whole(name: str, subset_by_index: Any, n: int) -> None:
    """Refuse a part of the eigenvectors or singular vectors."""
    if subset_by_index is not None and tuple(subset_by_index) != (0, n):
        raise unsupported(name, f"subset_by_index={subset_by_index}")


# Solves. `A y = b` gives `A dy = db - dA y`: one rule for every structure of A.


class Solve(Rule):
    """The last input is the right-hand side `b`, the others hold the matrix `A`.

    Formulas are `apply(y, *a)`, the product A y, and `transpose(ct, *a)`, the solve with the
    transpose of A.
    """

    def push(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], dxs: Sequence[Value]):
        *a, _ = xs
        *da, db = dxs
        if any(d is not None for d in da):
            given = [zeros(jax.typeof(x)) if d is None else d for x, d in zip(a, da, strict=True)]
            moved = self.call(self.formulas[0], eqn, ys[0], *given)
            db = lax.neg(moved) if db is None else lax.sub(db, moved)
        return bind(eqn, [*a, db])

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
    """`low` couples a row to the one above it (low[0] is unused), `high` to the one below."""
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


declare(Solve, "triangular_solve", "solve", [_triangular_apply, _triangular_transpose])
declare(Solve, "tridiagonal_solve", "solve", [_tridiagonal_apply, _tridiagonal_transpose])


def solve_left(a: Any, b: Any, **kind: bool) -> Any:
    """a⁻¹ b for a triangular `a`."""
    return jax.lax.linalg.triangular_solve(a, b, left_side=True, **kind)


def solve_right(a: Any, b: Any, **kind: bool) -> Any:
    """B a⁻¹ for a triangular `a`."""
    return jax.lax.linalg.triangular_solve(a, b, left_side=False, **kind)


# Factorizations.


def _cholesky(xs: Any, dxs: Any):
    # Murray, "Differentiation of the Cholesky decomposition", arXiv:1602.07527, section 3.1:
    # dL = L φ(L⁻¹ dA L⁻ᴴ), where φ takes the lower triangle and half of the diagonal.
    (a,), (da,) = xs, dxs
    y = lower(jax_primitives.cholesky_p.bind(a))
    if da is None:
        return [y], [None]
    inner = solve_right(y, hermitian(da, True), lower=True, transpose_a=True, conjugate_a=True)
    inner = solve_left(y, inner, lower=True)
    half = lax.sub(lower(inner), lax.mul(where(np.eye(a.shape[-1], dtype=bool), inner),
                                         np.asarray(0.5, a.dtype)))  # fmt: skip
    return [y], [dot(y, half)]


def _lu(xs: Any, dxs: Any):
    # de Hoog, Anderssen and Lukas, "Differentiation of matrix functionals using triangular
    # factorization", Math. Comp. 80 (2011): with M = L⁻¹ P dA U⁻¹,
    # dL = L tril(M, -1) and dU = triu(M) U. A factor that is not square is made so by an identity.
    (a,), (da,) = xs, dxs
    lu, pivots, permutation = jax_primitives.lu_p.bind(a)
    if da is None:
        return [lu, pivots, permutation], [None] * 3
    m, n = a.shape[-2:]
    k, batch = min(m, n), a.ndim - 2
    zero, still = np.zeros((), a.dtype), [(0, 0, 0)] * batch
    left = lax.pad(lax.slice_in_dim(lu, 0, k, axis=-1), zero, [*still, (0, 0, 0), (0, m - k, 0)])
    left = lax.add(lower(left, 1), eye(left))
    right = lax.pad(lax.slice_in_dim(lu, 0, k, axis=-2), zero, [*still, (0, n - k, 0), (0, 0, 0)])
    tail = np.diag(np.arange(n) >= k).astype(a.dtype)
    right = lax.add(upper(right), lax.broadcast_in_dim(tail, right.shape, (batch, batch + 1)))
    middle = solve_left(left, take_rows(da, permutation), lower=True, unit_diagonal=True)
    middle = solve_right(right, middle, lower=False)
    dlu = lax.add(dot(left, lower(middle, 1)), dot(upper(middle), right))
    return [lu, pivots, permutation], [dlu, None, None]


def _eigh(xs: Any, dxs: Any, *, lower: bool, sort_eigenvalues: bool, subset_by_index: Any,
          algorithm: Any = None):  # fmt: skip
    # Giles, "An extended collection of matrix derivative results for forward and reverse mode
    # algorithmic differentiation" (2008), section 3.1: dw = diag(Vᴴ dA V) and
    # dV = V (F ∘ Vᴴ dA V), F[i, j] = 1 / (w[j] - w[i]) off the diagonal.
    (a,), (da,) = xs, dxs
    whole("eigh", subset_by_index, a.shape[-1])
    v, w = jax_primitives.eigh_p.bind(
        a, lower=lower, sort_eigenvalues=sort_eigenvalues, subset_by_index=subset_by_index,
        algorithm=algorithm,
    )  # fmt: skip
    if da is None:
        return [v, w], [None, None]
    inner = dot(adjoint(v), dot(hermitian(da, lower), v))
    unit = eye(inner)
    gap = lax.add(lax.sub(columns(w, inner), rows(w, inner)), unit)
    dv = dot(v, lax.mul(lax.sub(lax.reciprocal(gap), unit), inner))
    return [v, w], [dv, lax.real(diagonal(inner)) if np.iscomplexobj(inner) else diagonal(inner)]


def _svd(xs: Any, dxs: Any, *, full_matrices: bool, compute_uv: bool, subset_by_index: Any,
         algorithm: Any = None):  # fmt: skip
    # Wan and Zhang, "Automatic differentiation for complex valued SVD", arXiv:1909.02659:
    # with M = Uᴴ dA V and F[i, j] = 1 / (s[j]² - s[i]²) off the diagonal, dU = U (F ∘ (M S + S Mᴴ)
    # + the imaginary diagonal of M / S), dV = V (F ∘ (S M + Mᴴ S)), ds = real(diag(M)); a factor
    # that is not square has a part of its own outside the space of its columns.
    (a,), (da,) = xs, dxs
    m, n = a.shape[-2:]
    if compute_uv:
        whole("svd", subset_by_index, min(m, n))
        if full_matrices and m != n:
            raise unsupported("svd", "full_matrices=True of a matrix that is not square")
    kind = {"subset_by_index": subset_by_index, "algorithm": algorithm}
    svd_p = jax_primitives.svd_p
    if da is None:
        ys = svd_p.bind(a, full_matrices=full_matrices, compute_uv=compute_uv, **kind)
        return ys, [None] * len(ys)
    s, u, vh = svd_p.bind(a, full_matrices=False, compute_uv=True, **kind)
    v, right = adjoint(vh), dot(da, adjoint(vh))
    inner = dot(adjoint(u), right)
    ds = lax.real(diagonal(inner)) if np.iscomplexobj(inner) else diagonal(inner)
    if not compute_uv:
        return [s], [ds]
    si, sj, unit = rows(s, inner), columns(s, inner), eye(inner)
    gap = lax.mul(lax.add(sj, si), lax.sub(sj, si))
    inverse = lax.sub(lax.reciprocal(lax.add(gap, unit)), unit)
    ms, sm = lax.mul(inner, sj), lax.mul(inner, si)
    du = lax.mul(inverse, lax.add(ms, adjoint(ms)))
    dv = lax.mul(inverse, lax.add(sm, adjoint(sm)))
    if np.iscomplexobj(inner):
        phase = lax.sub(inner, adjoint(inner))
        phase = lax.div(where(np.eye(min(m, n), dtype=bool), phase), lax.add(si, si))
        du = lax.add(du, phase)
    du, dv = dot(u, du), dot(v, dv)
    if m > n:
        du = lax.add(du, lax.div(lax.sub(right, dot(u, inner)), columns(s, du)))
    if n > m:
        left = dot(adjoint(da), u)
        dv = lax.add(dv, lax.div(lax.sub(left, dot(v, adjoint(inner))), columns(s, dv)))
    return [s, u, vh], [ds, du, adjoint(dv)]


def _qr(xs: Any, dxs: Any, *, pivoting: bool, full_matrices: bool, use_magma: Any = None):
    # Walter and Lehmann, "Algorithmic differentiation of linear algebra functions with application
    # in optimum experimental design", arXiv:1001.1654, section 4: with X = dA R⁻¹ and M = Qᴴ X,
    # Ω = tril(M, -1) - tril(M, -1)ᴴ is Qᴴ dQ; dQ = X + Q (Ω - M) and dR = Qᴴ dA - Ω R. Of a wide
    # matrix, the first square part makes Q. The diagonal of R is real.
    (a,), (da,) = xs, dxs
    m, n = a.shape[-2:]
    if full_matrices and m > n:
        raise unsupported("qr", "full_matrices=True of a tall matrix")
    q, r, *permutation = jax_primitives.qr_p.bind(
        a, pivoting=pivoting, full_matrices=full_matrices, use_magma=use_magma
    )
    if da is None:
        return [q, r, *permutation], [None] * (2 + len(permutation))
    if permutation:
        da = transposed(take_rows(transposed(da), permutation[0]))
    k = min(m, n)
    x = solve_right(
        lax.slice_in_dim(r, 0, k, axis=-1), lax.slice_in_dim(da, 0, k, axis=-1), lower=False
    )
    inner = dot(adjoint(q), x)
    turn = lax.sub(lower(inner, 1), adjoint(lower(inner, 1)))
    if np.iscomplexobj(inner):
        turn = lax.add(turn, where(np.eye(k, dtype=bool), imaginary(inner)))
    dq = lax.add(x, dot(q, lax.sub(turn, inner)))
    dr = upper(lax.sub(dot(adjoint(q), da), dot(turn, r)))
    return [q, r, *permutation], [dq, dr, *[None] * len(permutation)]


constant("lu_pivots_to_permutation")
composite("cholesky", _cholesky)
composite("lu", _lu)
composite("qr", _qr)
composite("eigh", _eigh)
composite("svd", _svd)
