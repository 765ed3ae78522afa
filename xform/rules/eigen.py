"""Rules of `eigh`, `eig` and `svd`: eigenvalues and singular values, with their vectors.

Each rule is a jvp: `_eigh(xs, dxs, ...)` returns a list of outputs and a list of their tangents,
from inputs and input tangents. It is valid where the result is a smooth function of the matrix:
distinct eigenvalues or singular values, and full rank. A complex eigenvector is determined up to a
phase, and the rules differentiate the phase that JAX chooses.

In formulas, dX is the tangent of X, Xᴴ the adjoint (conjugate transpose), and ∘ the elementwise
product. In the code, `inner` is the tangent of the matrix in the basis of the vectors, such as
Vᴴ dA V, and `unit` is an identity matrix. It is added where a diagonal would be divided by zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from xform._jax import JaxprEqn, jax_primitives
from xform.errors import UnsupportedParam
from xform.interpret.cost import factorization
from xform.registry.ends import matrices
from xform.registry.traits import Traits
from xform.registry.words import composite
from xform.rules.linalg import (
    adjoint,
    columns,
    diagonal,
    dot,
    eye,
    hermitian,
    identity,
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
        "compute the thin factorization with all vectors, or give the call a jax.custom_jvp",
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
    f = lax.sub(lax.reciprocal(gap), unit)
    dv = dot(v, lax.mul(f, inner))
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
    options = {"subset_by_index": subset_by_index, "algorithm": algorithm}
    svd_p = jax_primitives.svd_p
    if da is None:
        ys = svd_p.bind(a, full_matrices=full_matrices, compute_uv=compute_uv, **options)
        return ys, [None] * len(ys)
    s, u, vh = svd_p.bind(a, full_matrices=False, compute_uv=True, **options)
    v, da_v = adjoint(vh), dot(da, adjoint(vh))
    inner = dot(adjoint(u), da_v)  # M
    ds = lax.real(diagonal(inner)) if np.iscomplexobj(inner) else diagonal(inner)
    if not compute_uv:  # JAX computes singular values alone by another algorithm
        return None, [ds]
    si, sj, unit = rows(s, inner), columns(s, inner), eye(inner)
    gap = lax.mul(lax.add(sj, si), lax.sub(sj, si))
    f = lax.sub(lax.reciprocal(lax.add(gap, unit)), unit)
    ms, sm = lax.mul(inner, sj), lax.mul(inner, si)
    du = lax.mul(f, lax.add(ms, adjoint(ms)))
    dv = lax.mul(f, lax.add(sm, adjoint(sm)))
    if np.iscomplexobj(inner):
        phase = lax.sub(inner, adjoint(inner))
        phase = lax.div(where(identity(*inner.shape[-2:]), phase), lax.add(si, si))
        du = lax.add(du, phase)
    du, dv = dot(u, du), dot(v, dv)
    if m > n:
        du = lax.add(du, lax.div(lax.sub(da_v, dot(u, inner)), columns(s, du)))
    if n > m:
        dah_u = dot(adjoint(da), u)
        dv = lax.add(dv, lax.div(lax.sub(dah_u, dot(v, adjoint(inner))), columns(s, dv)))
    return [s, u, vh], [ds, du, adjoint(dv)]


def _eig(xs: Any, dxs: Any, *, compute_left_eigenvectors: bool, compute_right_eigenvectors: bool,
         enable_eigvec_derivs: bool, implementation: Any = None):  # fmt: skip
    # Giles (2008), section 3.1: with P = V⁻¹ dA V, dw = diag(P); `_eigenvector_tangent` computes
    # dV. A left eigenvector of A is a right eigenvector of Aᴴ, for the conjugate eigenvalue.
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
    options = {"enable_eigvec_derivs": enable_eigvec_derivs, "implementation": implementation}
    w, *left_vectors, v = jax_primitives.eig_p.bind(
        a, compute_left_eigenvectors=left, compute_right_eigenvectors=True, **options
    )
    # JAX computes eigenvalues alone by another algorithm. None means: bind the primitive for them.
    ys = [w, *left_vectors, v] if right else None
    da = lax.convert_element_type(da, v.dtype)
    inner = solve(v, dot(da, v))
    dys = [diagonal(inner)]
    if left:
        (u,) = left_vectors
        dys.append(_eigenvector_tangent(lax.conj(w), u, solve(u, dot(adjoint(da), u))))
    if right:
        dys.append(_eigenvector_tangent(w, v, inner))
    return ys, dys


def _eigenvector_tangent(w: Any, v: Any, inner: Any) -> Any:
    """Return the tangent of the eigenvectors `v`, for eigenvalues `w` and P = `inner`.

    JAX chooses eigenvectors of norm one whose entry of largest modulus is real. The tangent is
    U + V C, with U = V (F ∘ P), F[i, j] = 1 / (w[j] - w[i]) off the diagonal, and a diagonal C that
    preserves these two conditions.
    """
    unit = eye(v)
    gap = lax.add(lax.sub(columns(w, v), rows(w, v)), unit)
    u = dot(v, lax.mul(lax.sub(lax.reciprocal(gap), unit), inner))
    axis = v.ndim - 2
    largest = lax.argmax(lax.abs(v), axis, np.int32)
    is_largest = lax.eq(
        lax.broadcasted_iota(np.int32, v.shape, axis),
        lax.broadcast_in_dim(largest, v.shape, (*range(axis), axis + 1)),
    )
    largest_entry = lambda x: lax.reduce_sum(
        lax.mul(x, lax.convert_element_type(is_largest, x.dtype)), (axis,)
    )
    norm_change = lax.reduce_sum(lax.real(lax.mul(lax.conj(v), u)), (axis,))
    phase_change = lax.div(largest_entry(lax.imag(u)), largest_entry(lax.real(v)))
    return lax.sub(u, lax.mul(v, columns(lax.complex(norm_change, phase_change), v)))


def _svd_flops(eqn: JaxprEqn) -> float:
    """Return the FLOPs: more if singular vectors are computed."""
    vectors = lambda m, n: 6 * m * n**2 + 20 * n**3
    values = lambda m, n: 2 * m * n**2 + 2 * n**3
    return factorization(vectors if eqn.params["compute_uv"] else values)(eqn)


composite("eig", _eig, traits=Traits(flops=factorization(lambda m, n: 25 * n**3), ends=matrices))
composite("eigh", _eigh, traits=Traits(flops=factorization(lambda m, n: 9 * n**3), ends=matrices))
composite("svd", _svd, traits=Traits(flops=_svd_flops, ends=matrices))
