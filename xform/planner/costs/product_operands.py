"""Find the values that only matrix products read: a TPU's compiler stores them in half the bytes.

A TPU multiplies 32-bit operands as 16-bit numbers, unless the program asks for more precision. Its
compiler rounds an operand right after computing it. If only products and convolutions read the
value, the compiler stores the rounded copy alone.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.lax import Precision

from xform._jax import JaxprEqn, Var
from xform.interpret.joint import Joint
from xform.registry.table import traits


def product_operands(joint: Joint) -> frozenset[Var]:
    """Return the float32 values of the forward pass that only products read.

    `joint` holds the forward and the backward pass as one program. Every reader of such a value, in
    both passes, is a product, a convolution, or a view (such as a reshape) that only these read.
    """
    if "rounded" not in joint.program.cache:
        joint.program.cache["rounded"] = _find_product_operands(joint)
    return joint.program.cache["rounded"]


def _find_product_operands(joint: Joint) -> frozenset[Var]:
    """Return the same as `product_operands`, without the cache."""
    unrounded = {v for v in (*joint.outputs, *joint.backward_outputs) if isinstance(v, Var)}
    for eqn in reversed((*joint.forward, *joint.backward)):
        if _rounds_operands(eqn) or (
            traits(eqn.primitive).view and unrounded.isdisjoint(eqn.outvars)
        ):
            continue
        unrounded.update(v for v in eqn.invars if isinstance(v, Var))
    rounded = (v for eqn in joint.forward for v in eqn.outvars if v not in unrounded)
    return frozenset(v for v in rounded if getattr(v.aval, "dtype", None) == jnp.float32)


def _rounds_operands(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a product or convolution that may round its operands."""
    if not traits(eqn.primitive).product:
        return False
    precision = eqn.params["precision"]
    precisions = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, Precision.DEFAULT) for p in precisions)
