"""Rules of Cholesky, LU and QR factorizations, and of products of Householder reflections.

Each rule is a jvp: `_cholesky(xs, dxs)` returns a list of outputs and a list of their tangents,
from inputs and input tangents. It is valid where the factors are a smooth function of the matrix:
at full rank. For a symmetric input, only the triangle that the primitive reads has a derivative.

In formulas, dX is the tangent of X, Xᴴ the adjoint, tril and triu the lower and upper triangle. In
the code, `inner` is the tangent of the matrix between the inverse factors, such as L⁻¹ dA L⁻ᴴ.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import jax_primitives
from xform.interpret.cost import factorization
from xform.registry.ends import matrices
from xform.registry.traits import Traits
from xform.registry.words import composite, constant
from xform.rules.linalg import (
    adjoint,
    dot,
    eye,
    hermitian,
    identity,
    imaginary,
    lower,
    solve,
    solve_left,
    solve_right,
    take_rows,
    transposed,
    upper,
    where,
)
from xform.rules.reduce import jvp_of_definition


def _cholesky(xs: Any, dxs: Any):
    # Murray, "Differentiation of the Cholesky decomposition", arXiv:1602.07527, section 3.1:
    # dL = L φ(L⁻¹ dA L⁻ᴴ), where φ takes the lower triangle and half of the diagonal.
    (a,), (da,) = xs, dxs
    factor = jax_primitives.cholesky_p.bind(a)
    y = lower(factor)
    inner = solve_right(y, hermitian(da, True), lower=True, transpose_a=True, conjugate_a=True)
    inner = solve_left(y, inner, lower=True)
    half_diagonal = lax.mul(where(identity(*a.shape[-2:]), inner), np.asarray(0.5, a.dtype))
    return [factor], [dot(y, lax.sub(lower(inner), half_diagonal))]


def _lu(xs: Any, dxs: Any):
    # de Hoog, Anderssen and Lukas, "Differentiation of matrix functionals using triangular
    # factorization", Math. Comp. 80 (2011): with M = L⁻¹ P dA U⁻¹, dL = L tril(M, -1) and
    # dU = triu(M) U. A factor that is not square is extended by an identity.
    (a,), (da,) = xs, dxs
    lu, pivots, permutation = jax_primitives.lu_p.bind(a)
    if da is None:
        return [lu, pivots, permutation], [None] * 3
    m, n = a.shape[-2:]
    k, batch = min(m, n), a.ndim - 2
    zero, no_pad = np.zeros((), a.dtype), [(0, 0, 0)] * batch
    l_factor = lax.pad(
        lax.slice_in_dim(lu, 0, k, axis=-1), zero, [*no_pad, (0, 0, 0), (0, m - k, 0)]
    )
    l_factor = lax.add(lower(l_factor, 1), eye(l_factor))
    u_factor = lax.pad(
        lax.slice_in_dim(lu, 0, k, axis=-2), zero, [*no_pad, (0, n - k, 0), (0, 0, 0)]
    )
    extension = np.diag(np.arange(n) >= k).astype(a.dtype)
    u_factor = lax.add(
        upper(u_factor), lax.broadcast_in_dim(extension, u_factor.shape, (batch, batch + 1))
    )
    inner = solve_left(l_factor, take_rows(da, permutation), lower=True, unit_diagonal=True)
    inner = solve_right(u_factor, inner, lower=False)  # M
    dlu = lax.add(dot(l_factor, lower(inner, 1)), dot(upper(inner), u_factor))
    return [lu, pivots, permutation], [dlu, None, None]


def _qr(xs: Any, dxs: Any, *, pivoting: bool, full_matrices: bool, use_magma: Any = None):
    # Walter and Lehmann, "Algorithmic differentiation of linear algebra functions with application
    # in optimum experimental design", arXiv:1001.1654, section 4: with X = dA R⁻¹ and M = Qᴴ X,
    # Ω = tril(M, -1) - tril(M, -1)ᴴ is Qᴴ dQ; dQ = X + Q (Ω - M) and dR = Qᴴ dA - Ω R. The first
    # square part of a wide matrix determines Q. The diagonal of R is real, so Ω also has the
    # imaginary part of the diagonal of M.
    (a,), (da,) = xs, dxs
    q, r, *permutation = jax_primitives.qr_p.bind(
        a, pivoting=pivoting, full_matrices=full_matrices, use_magma=use_magma
    )
    if da is None:
        return [q, r, *permutation], [None] * (2 + len(permutation))
    if permutation:
        da = transposed(take_rows(transposed(da), permutation[0]))
    m, n = a.shape[-2:]
    k = min(m, n)
    full, q_full, r_full = full_matrices and m > n, q, r
    if full:
        q, r = lax.slice_in_dim(q, 0, n, axis=-1), lax.slice_in_dim(r, 0, n, axis=-2)
    x = solve_right(
        lax.slice_in_dim(r, 0, k, axis=-1), lax.slice_in_dim(da, 0, k, axis=-1), lower=False
    )
    inner = dot(adjoint(q), x)
    omega = lax.sub(lower(inner, 1), adjoint(lower(inner, 1)))
    if np.iscomplexobj(inner):
        omega = lax.add(omega, where(identity(k, k), imaginary(inner)))
    dq = lax.add(x, dot(q, lax.sub(omega, inner)))
    dr = upper(lax.sub(dot(adjoint(q), da), dot(omega, r)))
    if full:
        dq = lax.concatenate([dq, _tangent_of_full_columns(q, dq)], q.ndim - 1)
        no_pad = [(0, 0, 0)] * (r.ndim - 2)
        dr = lax.pad(dr, np.zeros((), dr.dtype), [*no_pad, (0, m - n, 0), (0, 0, 0)])
    return [q_full, r_full, *permutation], [dq, dr, *[None] * len(permutation)]


def _tangent_of_full_columns(q: Any, dq: Any) -> Any:
    """Return the tangent of the columns p that `full_matrices=True` appends to `q`.

    The full matrix Q = [q p] is a product of n reflections. It differs from the identity I by a
    matrix of rank n, which its first n rows and columns determine. With I = [E F] and
    Z = q₂ (q₁ - E₁)⁻¹, where index 1 means the first n rows and 2 the others, p = F + (q - E) Zᴴ.
    """
    m, n = q.shape[-2:]
    top = lambda a: lax.slice_in_dim(a, 0, n, axis=-2)
    bottom = lambda a: lax.slice_in_dim(a, n, m, axis=-2)
    q_minus_e = lax.sub(q, eye(q))
    divide = lambda a: solve(adjoint(top(q_minus_e)), adjoint(a))  # (a (q₁ - E₁)⁻¹)ᴴ
    zh = divide(bottom(q))  # Zᴴ
    dzh = divide(lax.sub(bottom(dq), dot(adjoint(zh), top(dq))))
    return lax.add(dot(dq, zh), dot(q_minus_e, dzh))


# Reflections and updates. `jvp_of_definition` makes the jvp of a primitive from an equivalent
# function of JAX operations.


def _reflect(a: Any, taus: Any, c: Any, backwards: bool) -> Any:
    """Return Q c, or Qᴴ c, for the product Q of the reflections I - τ v vᴴ stored in `a`.

    Each column of `a` stores one vector v: 1 on the diagonal, zeros above it, and the entries of
    `a` below it.
    """
    k, batch = taus.shape[-1], tuple(range(a.ndim - 2))
    vs = lax.slice_in_dim(a, 0, k, axis=-1)
    vs = lax.add(lower(vs, 1), eye(vs))
    vs = lax.transpose(lax.expand_dims(vs, (a.ndim,)), (a.ndim - 1, *batch, a.ndim - 2, a.ndim))
    taus = lax.transpose(taus, (a.ndim - 2, *batch))
    if backwards and np.iscomplexobj(taus):
        taus = lax.conj(taus)

    def step(c: Any, reflection: Any) -> Any:
        v, tau = reflection
        tau = lax.broadcast_in_dim(tau, c.shape, batch)
        return lax.sub(c, lax.mul(tau, dot(v, dot(adjoint(v), c)))), None

    return lax.scan(step, c, (vs, taus), reverse=not backwards)[0]


def _householder_product(a: Any, taus: Any) -> list[Any]:
    """Return the first columns of the product of reflections."""
    return [_reflect(a, taus, eye(a), backwards=False)]


def _ormqr(a: Any, taus: Any, c: Any, *, left: bool, transpose: bool) -> list[Any]:
    """Return Q c or c Q (with `transpose`, Qᴴ), for the product Q of reflections."""
    if left:
        return [_reflect(a, taus, c, backwards=transpose)]
    return [adjoint(_reflect(a, taus, adjoint(c), backwards=not transpose))]


def _symmetric_product(a: Any, c: Any, *, alpha: float, beta: float) -> list[Any]:
    """Return alpha a aᵀ + beta c."""
    product = dot(a, transposed(a))
    scaled = (lax.mul(x, np.asarray(f, x.dtype)) for x, f in ((product, alpha), (c, beta)))
    return [lax.add(*scaled)]


def _cholesky_update(r: Any, w: Any) -> list[Any]:
    """Return the upper Cholesky factor of rᵀ r + w wᵀ."""
    column = lax.expand_dims(w, (w.ndim,))
    gram = lax.add(dot(transposed(r), r), dot(column, transposed(column)))
    return [transposed(jax.lax.linalg.cholesky(gram, symmetrize_input=False))]


_qr_flops = factorization(lambda m, n: 2 * m * n**2 - 2 * n**3 / 3)

composite("householder_product", jvp_of_definition(_householder_product),
          traits=Traits(flops=_qr_flops, ends=matrices))  # fmt: skip
composite("ormqr", jvp_of_definition(_ormqr))
composite("symmetric_product", jvp_of_definition(_symmetric_product))
composite("cholesky_update", jvp_of_definition(_cholesky_update))
constant("lu_pivots_to_permutation", supported_params=("permutation_size",))
composite(
    "cholesky", _cholesky, traits=Traits(flops=factorization(lambda m, n: n**3 / 3), ends=matrices)
)
composite(
    "lu", _lu, traits=Traits(flops=factorization(lambda m, n: m * n**2 - n**3 / 3), ends=matrices)
)
composite("qr", _qr, traits=Traits(flops=lambda e: 2 * _qr_flops(e), ends=matrices))
