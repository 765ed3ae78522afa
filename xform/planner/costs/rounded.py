"""Values that products alone read: some compilers keep them with half their bits.

A TPU multiplies numbers of 32 bits, unless more precision is asked for, as numbers of 16: its
compiler rounds an operand where it is made, and keeps nothing else of it if nothing else reads it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.lax import Precision

from xform._jax import JaxprEqn, Var, conv_general_dilated_p, dot_general_p
from xform.interpret.joint import Joint
from xform.table import traits


def rounded(joint: Joint) -> frozenset[Var]:
    """Forward values of 32 bits that are read, as they are or as views, by products alone."""
    if "rounded" not in joint.program.cache:
        joint.program.cache["rounded"] = _rounded(joint)
    return joint.program.cache["rounded"]


def _rounded(joint: Joint) -> frozenset[Var]:
    whole = {v for v in (*joint.outputs, *joint.backward_outputs) if isinstance(v, Var)}
    for eqn in reversed((*joint.forward, *joint.backward)):
        if _rounds(eqn) or (traits(eqn.primitive).view and whole.isdisjoint(eqn.outvars)):
            continue
        whole.update(v for v in eqn.invars if isinstance(v, Var))
    made = (v for eqn in joint.forward for v in eqn.outvars if v not in whole)
    return frozenset(v for v in made if getattr(v.aval, "dtype", None) == jnp.float32)


def _rounds(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product of numbers that may be rounded."""
    if eqn.primitive not in (dot_general_p, conv_general_dilated_p):
        return False
    precision = eqn.params["precision"]
    each = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, Precision.DEFAULT) for p in each)
