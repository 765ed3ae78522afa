"""Which values of a body are sums over the slices.

An equation that sums over the sliced axis computes one term in each slice: the sum of the terms is
its result. A linear function of such a result is again a sum over the slices, of the function of
each term. Any other function would need the complete sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from xform._jax import JaxprEqn, Literal, Var
from xform.program.ir import Program
from xform.registry.table import linear_groups, traits
from xform.slices.slicing import Slicing


def sums_of_body(prog: Program, members: Mapping[int, Slicing]) -> frozenset[Var] | None:
    """Return the values that are sums over the slices; None if the body needs a complete sum.

    `members` are the equations that run in slices.
    """
    sums = set[Var]()
    for i, eqn in enumerate(prog.equations):
        found = members.get(i)
        terms = [isinstance(v, Var) and v in sums for v in eqn.invars]
        if found is None and any(terms):
            if not is_linear(eqn, terms):
                return None
            sums.update(eqn.outvars)
        elif found is not None and found.summed:
            # Every slice would add the operand that a scatter adds to.
            if any(terms) or traits(eqn.primitive).adds:
                return None
            pairs = zip(eqn.outvars, found.results, strict=True)
            sums.update(y for y, axis in pairs if axis is None)
        elif any(terms):
            return None
    return frozenset(sums)


def is_linear(eqn: JaxprEqn, terms: Sequence[bool]) -> bool:
    """Return whether the results are linear in the operands that are `terms`, together."""
    kinds = [getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars)]
    numbers = [kind is not None and jnp.issubdtype(kind, jnp.number) for kind in kinds]
    to_integers = any(_is_integer(v) for v in eqn.outvars) and not all(map(_is_integer, eqn.invars))
    if not all(numbers) or to_integers:
        return False
    found = {k for k, term in enumerate(terms) if term}
    zeros = {k for k, v in enumerate(eqn.invars) if _is_zero(v)}
    return any(found <= {*group} <= found | zeros for group in linear_groups(eqn))


def _is_integer(v: Any) -> bool:
    return jnp.issubdtype(v.aval.dtype, jnp.integer)


def _is_zero(v: Any) -> bool:
    """Return whether an operand is the number zero."""
    return isinstance(v, Literal) and not jnp.ndim(v.val) and v.val == 0
