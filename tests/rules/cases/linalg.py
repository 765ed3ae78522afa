"""Cases of `xform.rules.linalg` and `xform.rules.factor`. LAPACK has no bfloat16."""

import functools

import jax
import numpy as np
from jax import lax

from xform.testing import Case

RNG = np.random.default_rng(13)
LA = lax.linalg


def array(*shape):
    return RNG.normal(size=shape)


def well(*shape):
    """Return matrices far from singular."""
    return 0.4 * array(*shape) + 2.0 * np.eye(*shape[-2:])


def of_gram(f):
    """Return `f` of a positive definite matrix, which stays definite when its input moves."""

    def fun(x):
        n = x.ndim
        dims = ((n - 1,), (n - 1,)), (tuple(range(n - 2)),) * 2
        gram = lax.dot_general(x, lax.conj(x) if x.dtype.kind == "c" else x, dims)
        return f(gram)

    return fun


def solve(**kwargs):
    return lambda a, b: LA.triangular_solve(a, b, **kwargs)


def tridiagonal(low, middle, high, b):
    return LA.tridiagonal_solve(low, middle, high, b)


def lu(x):
    return LA.lu(x)[0]


@jax.jit
def permuted(x):
    """Inside a jit, because outside of it the rule of an integer function is not used."""
    lu, pivots, _ = LA.lu(x)
    return lu * LA.lu_pivots_to_permutation(pivots, x.shape[-2])[:, None].astype(x.dtype)


def qr(x, **kwargs):
    return LA.qr(x, full_matrices=False, **kwargs)[:2]


def whole_qr(x, **kwargs):
    return LA.qr(x, full_matrices=True, **kwargs)[:2]


def multiplied(**kwargs):
    return lambda a, taus, c: LA.ormqr(a, taus, c, **kwargs)


def gram(a, c):
    return LA.symmetric_product(a, c + c.T, alpha=0.7, beta=-1.5)


def updated(r, w):
    """The input is an upper triangle; the primitive does not read below it."""
    return LA.cholesky_update(r * np.triu(np.ones(r.shape)).astype(r.dtype), w)


TAUS = np.array([1.2, 0.7])


case = functools.partial(Case, bfloat16=False)
LEFT = {"left_side": True}

# Second derivatives take long to compile, so only one case of each factorization has them.
CASES = [
    case("triangular_solve", solve(**LEFT), (well(3, 3), array(3, 2)), complex=True),
    case("triangular_solve", solve(lower=True), (well(3, 3), array(2, 3)), "lower", complex=True),
    case("triangular_solve", solve(**LEFT, transpose_a=True), (well(3, 3), array(3, 2)), "T"),
    case("triangular_solve", solve(lower=True, transpose_a=True, conjugate_a=True),
         (well(3, 3), array(2, 3)), "adjoint", complex=True),
    case("triangular_solve", solve(**LEFT, conjugate_a=True), (well(3, 3), array(3, 2)),
         "conjugate", complex=True),
    case("triangular_solve", solve(**LEFT, lower=True, unit_diagonal=True),
         (well(2, 3, 3), array(2, 3, 2)), "unit diagonal, batch"),
    case("triangular_solve", solve(**LEFT), (well(0, 3, 3), array(0, 3, 2)), "empty"),
    case("tridiagonal_solve", tridiagonal, (array(4), 4 + array(4), array(4), array(4, 2))),
    case("cholesky", of_gram(LA.cholesky), (well(3, 3),), complex=True),
    case("cholesky", of_gram(LA.cholesky), (well(2, 3, 3),), "batch", second=False),
    case("lu", lu, (array(4, 4),), complex=True),
    case("lu", lu, (array(5, 3),), "tall", second=False),
    case("lu", lu, (array(2, 3, 5),), "wide, batch", second=False),
    case("lu_pivots_to_permutation", permuted, (array(4, 4),)),
    case("qr", qr, (array(4, 4),), complex=True),
    case("qr", qr, (array(2, 5, 3),), "tall, batch", complex=True, second=False),
    case("qr", qr, (array(3, 5),), "wide", complex=True, second=False),
    case("qr", whole_qr, (array(5, 3),), "tall, whole", complex=True),
    case("qr", lambda x: whole_qr(x, pivoting=True), (array(2, 4, 2),),
         "tall, whole, pivots, batch", second=False, jax=False),
    # JAX has no rule for these.
    case("householder_product", LA.householder_product, (array(4, 3), TAUS), complex=True,
         jax=False),
    case("householder_product", LA.householder_product, (array(2, 4, 2), np.stack([TAUS, TAUS])),
         "batch", jax=False),
    case("ormqr", multiplied(), (array(4, 3), TAUS, array(4, 2)), complex=True, jax=False),
    case("ormqr", multiplied(left=False, transpose=True), (array(4, 2), TAUS, array(3, 4)),
         "right, transposed", complex=True, jax=False),
    case("symmetric_product", gram, (array(3, 2), array(3, 3)), jax=False),
    case("cholesky_update", updated, (well(3, 3), array(3)), jax=False, vmap=False),
]  # fmt: skip
