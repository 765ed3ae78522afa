"""1 - x² as one operation: JAX 0.12's primitive, and an equal one for older versions.

The value is computed as (1 - x) (1 + x), which keeps its digits as |x| goes to 1. The derivative is
-2 x. The derivative of the product would be a difference, which loses the digits of a small x.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental import jet

from xform._jax import Primitive, ad, batching, mlir, primitive_named


def _by_factors(x: Any) -> Any:
    one = lax.full_like(x, 1)
    return lax.mul(lax.sub(one, x), lax.add(one, x))


def _new() -> Primitive:
    p = Primitive("one_minus_square")
    p.def_impl(jax.jit(_by_factors))
    p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(p, mlir.lower_fun(_by_factors, multiple_results=False))
    batching.defvectorized(p)
    ad.defjvp(p, lambda t, x: lax.mul(t, lax.mul(lax.full_like(x, -2), x)))
    jet.jet_rules[p] = lambda xs, series: jet.jet(_by_factors, xs, series)
    return p


one_minus_square_p: Any = primitive_named("one_minus_square") or _new()
