"""Operations that a compiler drops, as their result is one of their operands: x + 0, x * 1."""

from __future__ import annotations

import math

from jax import lax

from xform._jax import JaxprEqn, Literal
from xform.planner.simulate.products import shape
from xform.planner.simulate.steps import Cell

# The number that an operation leaves its other operand unchanged for, and which operand it is.
_UNITS = {
    lax.add_p: (0, (0, 1)), lax.sub_p: (0, (1,)), lax.mul_p: (1, (0, 1)), lax.div_p: (1, (1,)),
    lax.max_p: (-math.inf, (0, 1)), lax.min_p: (math.inf, (0, 1)),
}  # fmt: skip


def unchanged(eqn: JaxprEqn, reads: list[Cell]) -> Cell | None:
    """The operand that an operation's result is, if it is one of them."""
    prim, aval = eqn.primitive, eqn.outvars[0].aval
    if prim is lax.convert_element_type_p:
        same = getattr(eqn.invars[0].aval, "dtype", None) == getattr(aval, "dtype", 0)
        return reads[0] if same else None
    unit, places = _UNITS.get(prim, (None, ()))
    for i in places:
        v = eqn.invars[i]
        if isinstance(v, Literal) and v.val == unit and reads[1 - i].shape == shape(aval):
            return reads[1 - i]
    return None
