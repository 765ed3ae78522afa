"""Eigenvalues and singular values, with their vectors.

They are differentiated where they are smooth: at distinct values and full rank. There the phases of
complex vectors are those that JAX chooses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from xform._jax import JaxprEqn, jax_primitives
from xform.errors import UnsupportedParam
from xform.interpret.cost import factorization
from xform.registry.traits import Traits
from xform.registry.words import composite
from xform.rules.linalg import (
    adjoint,
    columns,
    diagonal,
    dot,
    eye,
    hermitian,
    rows,
    solve,
    where,
)


def unsupported_error(name: str, what: str) -> UnsupportedParam:
    """Return the error for a decomposition that has no derivative rule."""
    return UnsupportedParam(
        f"derivative of {name}",
        f"{what} has no derivative rule",
        "",
        "compute the thin factorization with all vectors, or declare a rule with jax.custom_jvp",
    )


def check_no_subset(name: str, subset_by_index: Any, n: int) -> None:
    """Raise UnsupportedParam for a subset of the eigenvectors or singular vectors."""
    if subset_by_index is not None and tuple(subset_by_index) != (0, n):
        raise unsupported_error(name, f"subset_by_index={subset_by_index}")


def _eigh(xs: Any, dxs: Any, *, lower: bool, sort_eigenvalues: bool, subset_by_index: Any,
          algorithm: Any = None):  # fmt: skip
    # Giles, "An extended collection of matrix derivative results for forward and reverse mode
    # algorithmic differentiation" (2008), section 3.1: dw = diag(Vᴴ dA V) and
    # dV = V (F ∘ Vᴴ dA V), F[i, j] = 1 / (w[j] - w[i]) off the diagonal.
    (a,), (da,) = xs, dxs
    check_no_subset("eigh", subset_by_index, a.shape[-1])
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
    # + the imaginary diagonal of M / S), dV = V (F ∘ (S M + Mᴴ S)), ds = real(diag(M)). A factor
    # that is not square has another term, outside the space of its columns.
    (a,), (da,) = xs, dxs
    m, n = a.shape[-2:]
    if compute_uv:
        check_no_subset("svd", subset_by_index, min(m, n))
        if full_matrices and m != n:
            raise unsupported_error("svd", "full_matrices=True of a matrix that is not square")
    kind = {"subset_by_index": subset_by_index, "algorithm": algorithm}
    svd_p = jax_primitives.svd_p
    if da is None:
        ys = svd_p.bind(a, full_matrices=full_matrices, compute_uv=compute_uv, **kind)
        return ys, [None] * len(ys)
    s, u, vh = svd_p.bind(a, full_matrices=False, compute_uv=True, **kind)
    v, right = adjoint(vh), dot(da, adjoint(vh))
    inner = dot(adjoint(u), right)
    ds = lax.real(diagonal(inner)) if np.iscomplexobj(inner) else diagonal(inner)
    if not compute_uv:  # JAX computes singular values alone by another algorithm
        return None, [ds]
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


def _eig(xs: Any, dxs: Any, *, compute_left_eigenvectors: bool, compute_right_eigenvectors: bool,
         enable_eigvec_derivs: bool, implementation: Any = None):  # fmt: skip
    # Giles (2008), section 3.1: with P = V⁻¹ dA V, dw = diag(P); dV is in `_move`. A left vector of
    # A is a right vector of Aᴴ, for the conjugate eigenvalue.
    (a,), (da,) = xs, dxs
    left, right = compute_left_eigenvectors, compute_right_eigenvectors
    if (left or right) and not enable_eigvec_derivs:
        raise UnsupportedParam(
            "derivative of eig",
            "the eigenvectors of a matrix that is not symmetric have no derivative unless its "
            "eigenvalues are distinct, which cannot be checked",
            "",
            "pass enable_eigvec_derivs=True to jax.lax.linalg.eig if they are, or compute the "
            "eigenvalues alone",
        )
    kind = {"enable_eigvec_derivs": enable_eigvec_derivs, "implementation": implementation}
    w, *rest, v = jax_primitives.eig_p.bind(
        a, compute_left_eigenvectors=left, compute_right_eigenvectors=True, **kind
    )
    ys = [w, *rest, v] if right else None  # JAX computes eigenvalues alone by another algorithm
    da = lax.convert_element_type(da, v.dtype)
    inner = solve(v, dot(da, v))
    dys = [diagonal(inner)]
    if left:
        (u,) = rest
        dys.append(_move(lax.conj(w), u, solve(u, dot(adjoint(da), u))))
    if right:
        dys.append(_move(w, v, inner))
    return ys, dys


def _move(w: Any, v: Any, inner: Any) -> Any:
    """Return the tangent of eigenvectors with a real longest entry and norm one.

    It is U + V C, with U = V (F ∘ P), F[i, j] = 1 / (w[j] - w[i]) off the diagonal, and a diagonal
    C that preserves these two conditions.
    """
    unit = eye(v)
    gap = lax.add(lax.sub(columns(w, v), rows(w, v)), unit)
    free = dot(v, lax.mul(lax.sub(lax.reciprocal(gap), unit), inner))
    axis = v.ndim - 2
    longest = lax.argmax(lax.abs(v), axis, np.int32)
    chosen = lax.eq(
        lax.broadcasted_iota(np.int32, v.shape, axis),
        lax.broadcast_in_dim(longest, v.shape, (*range(axis), axis + 1)),
    )
    at = lambda x: lax.reduce_sum(lax.mul(x, lax.convert_element_type(chosen, x.dtype)), (axis,))
    stretch = lax.reduce_sum(lax.real(lax.mul(lax.conj(v), free)), (axis,))
    turn = lax.div(at(lax.imag(free)), at(lax.real(v)))
    return lax.sub(free, lax.mul(v, columns(lax.complex(stretch, turn), v)))


def _svd_flops(eqn: JaxprEqn) -> float:
    vectors = lambda m, n: 6 * m * n**2 + 20 * n**3
    values = lambda m, n: 2 * m * n**2 + 2 * n**3
    return factorization(vectors if eqn.params["compute_uv"] else values)(eqn)


composite("eig", _eig, Traits(flops=factorization(lambda m, n: 25 * n**3)))
composite("eigh", _eigh, Traits(flops=factorization(lambda m, n: 9 * n**3)))
composite("svd", _svd, Traits(flops=_svd_flops))
