"""Cases of `xform.rules.eigen`."""

import functools

import numpy as np
from jax import lax

from tests.rules.cases.linalg import array, of_gram, well
from xform.testing import Case

LA = lax.linalg


def phased(*vectors):
    """Squared moduli, because the phase of a complex vector is a convention."""
    return tuple(lax.square(lax.abs(v)) if v.dtype.kind == "c" else v for v in vectors)


def eigh(x, **kwargs):
    v, w = LA.eigh(x, **kwargs)
    return (*phased(v), w)


def svd(x, **kwargs):
    u, s, v = LA.svd(x, full_matrices=False, **kwargs)
    return (*phased(u, v), s)


def eig(x, **kwargs):
    return LA.eig(x, enable_eigvec_derivs=True, **kwargs)


def eigenvalues(x):
    return LA.eig(x, compute_left_eigenvectors=False, compute_right_eigenvectors=False)


right = functools.partial(eig, compute_left_eigenvectors=False)
left = functools.partial(eig, compute_right_eigenvectors=False)
case = functools.partial(Case, bfloat16=False)
values = lambda x: LA.svd(x, compute_uv=False)
# Real eigenvalues, far apart. For a pair of complex ones the sign of the vectors is a convention.
APART = well(4, 4) + np.diag(4.0 * np.arange(4.0))

CASES = [
    case("eigh", of_gram(eigh), (well(4, 4),), complex=True),
    case("eigh", of_gram(lambda x: eigh(x, lower=False)), (well(2, 3, 3),),
         "upper, batch", second=False),
    case("svd", svd, (array(4, 4),), complex=True),
    case("svd", svd, (array(5, 3),), "tall", complex=True, second=False),
    case("svd", svd, (array(2, 3, 5),), "wide, batch", second=False),
    case("svd", values, (array(5, 3),), "values", complex=True, second=False),
    case("eig", eig, (APART,), complex=True),
    case("eig", right, (np.stack([APART[:3, :3], APART[1:, 1:]]),), "right, batch", second=False),
    case("eig", left, (APART[:3, :3],), "left", second=False),
    case("eig", eigenvalues, (array(3, 3),), "values", complex=True, second=False),
]  # fmt: skip
