"""Rules that other libraries registered with JAX for their own primitives.

JAX keeps them in two tables in `jax.interpreters.ad`: `primitive_jvps` (how to push tangents) and
`primitive_transposes` (how to transpose a linear operation). xform calls these rules as JAX does,
for a primitive that has no rule of `xform.extend`. JAX's own primitives are never differentiated in
this way. The base class `Structured` describes the methods of a rule (`xform.interpret.node`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from xform._jax import JaxprEqn, Primitive, ad, cotangent_aval, primitive_named, tangent_aval
from xform.errors import NotDifferentiable
from xform.interpret.node import Structured
from xform.interpret.pullback import pull_of_jvp
from xform.program.arithmetic import Value
from xform.program.arrays import zeros
from xform.program.hijax import blocks_derivatives
from xform.program.ir import Mask
from xform.program.source import frame
from xform.registry.table import RULES, Rule
from xform.registry.traits import UNKNOWN
from xform.rules.user_rules import none_if_zero, with_jax_zeros


class Foreign(Structured):
    """The rule of a primitive whose rules are in JAX's public tables."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        derivative_is_lost = not eqn.outvars or any(blocks_derivatives(v.aval) for v in eqn.outvars)
        if any(active) and derivative_is_lost:
            raise NotDifferentiable(
                f"derivative of {eqn.primitive.name}",
                "it writes a value that is being differentiated to a mutable value, which has no "
                "derivative",
                frame(eqn),
                "return the value instead, or write jax.lax.stop_gradient of it",
            )
        return super().active(eqn, active)

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        push = ad.primitive_jvps.get(eqn.primitive)
        if push is None:
            raise _missing_rule(eqn, "push tangents", "ad.primitive_jvps")
        full = with_jax_zeros(dxs, eqn.invars, tangent_aval)
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
            raise _missing_rule(eqn, "transpose it", "ad.primitive_transposes")
        triples = zip(xs, eqn.invars, active, strict=True)
        inputs = [ad.UndefinedPrimal(v.aval) if on else x for x, v, on in triples]

        def pull(cts: Sequence[Value]) -> list[Value]:
            full = with_jax_zeros(cts, eqn.outvars, cotangent_aval)
            ct = full if eqn.primitive.multiple_results else full[0]
            results = transpose(ct, *inputs, **_params(eqn))
            pairs = zip(results, active, strict=True)
            return [none_if_zero(ct) if on else None for ct, on in pairs]

        return [zeros(v.aval) for v in eqn.outvars], pull


def _params(eqn: JaxprEqn) -> dict[str, Any]:
    """Return the parameters as the primitive's `bind` takes them."""
    return eqn.primitive.get_bind_params(eqn.params)


def _missing_rule(eqn: JaxprEqn, what: str, table: str) -> NotDifferentiable:
    """Return the error for a primitive that has an entry in only one of the two tables."""
    return NotDifferentiable(
        f"derivative of {eqn.primitive.name}",
        f"its library registered a rule with JAX, but none to {what}: jax.interpreters.{table} "
        "has no entry",
        frame(eqn),
        "declare a rule with xform.extend, or wrap the call in jax.custom_vjp (jax.custom_jvp for "
        "forward mode)",
    )


def has_rule(primitive: Primitive) -> bool:
    """Return whether a primitive of another library has a rule in JAX's tables."""
    in_tables = primitive in ad.primitive_jvps or primitive in ad.primitive_transposes
    return in_tables and primitive_named(primitive.name) is not primitive  # it is JAX's own


_FOREIGN_RULES: weakref.WeakKeyDictionary[Primitive, Rule] = weakref.WeakKeyDictionary()


def foreign_rule(primitive: Primitive) -> Rule | None:
    """Return the rule of a primitive of another library; None if JAX's tables have none for it."""
    if primitive not in _FOREIGN_RULES and has_rule(primitive):
        _FOREIGN_RULES[primitive] = Foreign(primitive.name, "foreign", traits=UNKNOWN)
    return _FOREIGN_RULES.get(primitive)


def foreign_primitives() -> list[Primitive]:
    """Return all primitives of other loaded libraries that have rules in JAX's tables alone."""
    without_own_rule = {*ad.primitive_jvps, *ad.primitive_transposes} - RULES.keys()
    return sorted(filter(has_rule, without_own_rule), key=lambda p: (type(p).__module__, p.name))
