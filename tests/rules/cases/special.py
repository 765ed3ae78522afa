"""Special functions: one case each, then inputs where the formula changes."""

import numpy as np
from jax import lax

from xform.testing import Case

X = np.array([0.3, -0.7, 1.4])
P = np.array([0.4, 0.9, 2.3])  # positive
U = np.array([-0.6, 0.2, 0.7])  # within (-1, 1)


def unary(name, x=X, **fields):
    return Case(name, getattr(lax, name), (x,), **fields)


CASES = [
    *(unary(n) for n in ("erf", "erfc", "bessel_i0e", "bessel_i1e")),
    unary("erf_inv", U),
    *(unary(n, P) for n in ("lgamma", "digamma")),
    # The limit 1/2, which the formula does not reach by itself; the slope has a kink there.
    unary("bessel_i1e", np.array([0.0, 1e-20]), label="zero", second=False, differences=False),
    # Gamma, zeta and beta.
    Case("polygamma", lambda x: lax.polygamma(lax.full_like(x, 1), x), (P,), bfloat16=False),
    Case("zeta", lambda q: lax.zeta(lax.full_like(q, 2.5), q), (P,), bfloat16=False, jax=False),
    Case("igamma", lambda x: lax.igamma(lax.full_like(x, 1.7), x), (P,)),
    # JAX has no derivative of igamma_grad_a, which our second derivatives use.
    Case("igamma", lax.igamma, (P, P[::-1] + 0.2), "shape", second=False, bfloat16=False),
    Case("igammac", lambda x: lax.igammac(lax.full_like(x, 1.7), x), (P,)),
    Case("igammac", lax.igammac, (P, P[::-1] + 0.2), "shape", second=False, bfloat16=False),
    Case(
        "igamma_grad_a",
        lambda x: lax.igamma_grad_a(lax.full_like(x, 1.7), x),
        (P,),
        jax=False,
        bfloat16=False,
    ),
    Case(
        "regularized_incomplete_beta",
        lambda x: lax.betainc(lax.full_like(x, 1.3), lax.full_like(x, 2.1), x),
        (np.array([0.2, 0.5, 0.8]),),
    ),
]
