"""The rule of operations on mutable references (`jax.new_ref`) made outside the function.

"The function" is the one that is differentiated. The value of such a reference is a constant.
Writing an active value (one that depends on a differentiated input) to it is an error. References
that the function makes itself have already been replaced by values (`xform.program.references`).
"""

from __future__ import annotations

from xform._jax import JaxprEqn
from xform.errors import NotDifferentiable
from xform.program.ir import Mask
from xform.program.source import frame
from xform.registry.table import Rule, declare
from xform.registry.traits import Traits, none


class OutsideReference(Rule):
    """The rule of an operation on a reference made outside. It may not write active values."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        kind = getattr(eqn.invars[0].aval, "kind", None) if eqn.invars else None
        if any(active) and kind != "no_grad_no_remat":
            raise NotDifferentiable(
                f"derivative of a function that writes to a reference ({self.name})",
                "a value that is being differentiated is written to a reference from outside the "
                "function, where its derivative would be lost",
                frame(eqn),
                "make the reference inside the function with jax.new_ref, return the value "
                "instead, or write jax.lax.stop_gradient of it",
            )
        return (False,) * len(eqn.outvars)


for _name in (
    "new_ref",
    "empty_ref",
    "get",
    "swap",
    "addupdate",
    "freeze",
    "free_ref",
    "run_state",
):
    declare(OutsideReference, _name, "reference", (), Traits(foldable=False, flops=none),
            supported_params=None)  # fmt: skip
