"""Find operations that XLA removes: it uses an operand in place of the result.

These are copies, conversions to the same dtype, and operations with a neutral element, such as
`x * 1`. The planner does not count their results as values that need memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Literal
from xform.registry.table import traits

# Operations that return their operand unchanged.
_COPIES = frozenset({"copy", "copy_p", "stop_gradient"})
_REDUCTIONS = frozenset({
    lax.reduce_sum_p, lax.reduce_prod_p, lax.reduce_max_p, lax.reduce_min_p, lax.reduce_and_p,
    lax.reduce_or_p,
})  # fmt: skip


def unchanged_operand(eqn: JaxprEqn, producers: Mapping[Any, JaxprEqn] | None = None) -> int | None:
    """Return the position of the operand that XLA uses as the result; None if XLA uses none.

    `producers` maps each value to the equation that makes it. With it, an operand that is a
    broadcast number is recognized too.
    """
    prim = eqn.primitive
    if prim.name in _COPIES:
        return 0
    if prim is lax.convert_element_type_p:
        old, new = (getattr(v.aval, "dtype", None) for v in (eqn.invars[0], eqn.outvars[0]))
        return 0 if old is not None and old == new else None
    # XLA removes even `x + 0`, although -0.0 + 0 is 0. The pass `Simplify` is exact, and keeps it.
    neutral, positions = traits(prim).neutral or (0.0, ())
    for i in positions:
        is_neutral = known_number(eqn.invars[i], producers or {}) == neutral
        if is_neutral and _shape(eqn.invars[1 - i]) == _shape(eqn.outvars[0]):
            return 1 - i
    return None


def is_reshape(eqn: JaxprEqn) -> bool:
    """Return whether an equation reduces only axes of length one. XLA replaces it by a reshape."""
    if eqn.primitive not in _REDUCTIONS:
        return False
    shape = _shape(eqn.invars[0])
    return all(shape[axis] == 1 for axis in eqn.params["axes"])


def known_number(atom: Any, producers: Mapping[Any, JaxprEqn]) -> float | None:
    """Return the real number that all elements of a value equal; None if it is unknown.

    `atom` is a variable or literal. `producers` maps each value to the equation that makes it.
    """
    eqn = None if isinstance(atom, Literal) else producers.get(atom)
    if eqn is not None and eqn.primitive is lax.broadcast_in_dim_p:
        atom = eqn.invars[0]
    if not isinstance(atom, Literal) or np.ndim(atom.val):
        return None
    dtype = _type(atom).dtype
    if not isinstance(dtype, np.dtype) or np.issubdtype(dtype, np.complexfloating):
        return None
    return float(np.asarray(atom.val).astype(np.float64))


def _type(atom: Any) -> Any:
    return atom.aval


def _shape(atom: Any) -> tuple[int, ...]:
    return _type(atom).shape
