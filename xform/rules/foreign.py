"""Rules that other libraries registered with JAX for their own primitives.

`jax.interpreters.ad` stores them by primitive: how to push tangents, and how to transpose a linear
operation. These rules belong to their libraries, and xform calls them as JAX does. JAX's own
primitives are never differentiated in this way. A rule of `xform.extend` takes precedence.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from xform._jax import (
    JaxprEqn,
    Primitive,
    ad,
    cotangent_aval,
    named,
    tangent_aval,
    zeros,
)
from xform.errors import NotDifferentiable
from xform.interpret.node import Structured
from xform.interpret.pullback import pull_of_jvp
from xform.program.arithmetic import Value
from xform.program.hijax import blocks_derivatives
from xform.program.ir import Mask
from xform.program.source import frame
from xform.registry.table import RULES, Rule
from xform.registry.traits import UNKNOWN
from xform.rules.custom import none_if_zero, with_zeros


class Foreign(Structured):
    """The rule of a primitive whose rules are in JAX's public tables."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        lost = not eqn.outvars or any(blocks_derivatives(v.aval) for v in eqn.outvars)
        if any(active) and lost:
            raise NotDifferentiable(
                f"derivative of {eqn.primitive.name}",
                "it writes a value that is being differentiated to a place without derivatives",
                frame(eqn),
                "return the value instead, or write jax.lax.stop_gradient of it",
            )
        return super().active(eqn, active)

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        push = ad.primitive_jvps.get(eqn.primitive)
        if push is None:
            raise _refusal(eqn, "push tangents", "ad.primitive_jvps")
        full = with_zeros(dxs, eqn.invars, tangent_aval)
        ys, dys = push(tuple(xs), tuple(full), **_params(eqn))
        if not eqn.primitive.multiple_results:
            ys, dys = [ys], [dys]
        return list(ys), list(map(none_if_zero, dys))

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        return self.jvp(eqn, xs, dxs)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        return pull_of_jvp(functools.partial(self.jvp, eqn), xs, active, wanted)

    def transposed(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        transpose = ad.primitive_transposes.get(eqn.primitive)
        if transpose is None:
            raise _refusal(eqn, "transpose it", "ad.primitive_transposes")
        places = zip(xs, eqn.invars, active, strict=True)
        inputs = [ad.UndefinedPrimal(v.aval) if on else x for x, v, on in places]

        def pull(cts: Sequence[Value]) -> list[Value]:
            full = with_zeros(cts, eqn.outvars, cotangent_aval)
            several = eqn.primitive.multiple_results
            results = transpose(full if several else full[0], *inputs, **_params(eqn))
            pairs = zip(results, active, strict=True)
            return [none_if_zero(ct) if on else None for ct, on in pairs]

        return [zeros(v.aval) for v in eqn.outvars], pull


def _params(eqn: JaxprEqn) -> dict[str, Any]:
    """Return the parameters as the primitive's `bind` takes them."""
    return eqn.primitive.get_bind_params(eqn.params)


def _refusal(eqn: JaxprEqn, what: str, table: str) -> NotDifferentiable:
    """Return the error for a primitive whose library gave JAX no rule of this kind."""
    return NotDifferentiable(
        f"derivative of {eqn.primitive.name}",
        f"its library registered a rule with JAX, but none to {what}: jax.interpreters.{table} "
        "has no entry",
        frame(eqn),
        "declare a rule with xform.extend, or wrap the call in jax.custom_vjp (jax.custom_jvp for "
        "forward mode)",
    )


def has_rule(primitive: Primitive) -> bool:
    """Whether a primitive of another library has a rule in JAX's tables."""
    known = primitive in ad.primitive_jvps or primitive in ad.primitive_transposes
    return known and named(primitive.name) is not primitive


_FOREIGN_RULES: weakref.WeakKeyDictionary[Primitive, Rule] = weakref.WeakKeyDictionary()


def foreign_rule(primitive: Primitive) -> Rule | None:
    """Return the rule of a primitive that has none in xform's registry; None if JAX has none."""
    if primitive not in _FOREIGN_RULES and has_rule(primitive):
        _FOREIGN_RULES[primitive] = Foreign(primitive.name, "foreign", traits=UNKNOWN)
    return _FOREIGN_RULES.get(primitive)


def foreign_primitives() -> list[Primitive]:
    """Return all primitives of the loaded libraries that have rules in JAX's tables."""
    known = {*ad.primitive_jvps, *ad.primitive_transposes} - RULES.keys()
    return sorted(filter(has_rule, known), key=lambda p: (type(p).__module__, p.name))
