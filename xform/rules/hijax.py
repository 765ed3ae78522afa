"""Operation objects with their own derivatives (`jax.experimental.hijax`): xform calls their rules.

Such an object is the parameter `_prim` of an equation of `call_hi_primitive`. Its rules are
methods: `jvp`; `lin` with `linearized`; `vjp_fwd` with `vjp_bwd` or `vjp_bwd_retval`; and
`transpose`. An object may define only some of them. If JAX derives one of them from another by its
autodiff, xform derives it by its own autodiff. JAX's newer `custom_vjp` is such an object, too. The
base class `Structured` describes the methods of a rule (`xform.interpret.node`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax

from xform._jax import JaxprEqn, cotangent_aval, tangent_aval
from xform._jax.operation_objects import NullAccum, ValAccum
from xform.errors import NotDifferentiable, WrongCotangent
from xform.interpret.absent import group_cotangents
from xform.interpret.logs import log
from xform.interpret.node import Pull, Structured, gather, spread
from xform.interpret.pullback import RULE_RETURNED_NONE, check_cotangent, pull_of_jvp, pullback
from xform.program.arithmetic import Value, add
from xform.program.hijax import blocks_derivatives, defines_rule, jax_class_name, operation_name
from xform.program.ir import Mask, apply, program, trace
from xform.program.source import frame
from xform.registry.table import declare
from xform.registry.traits import Traits
from xform.rules.refused import refuse_push
from xform.rules.user_rules import (
    closes_over_active,
    indexable,
    no_forward_mode,
    none_if_zero,
    residual_for_rule,
    with_jax_zeros,
)


class _Sum(ValAccum):
    """Accumulates the cotangent of an active input.

    A rule for reverse mode gets an accumulator for each input. It calls their method `accum` with
    the cotangents, and returns nothing.
    """

    def __init__(self, eqn: JaxprEqn, variable: Any):
        self.eqn, self.variable = eqn, variable
        super().__init__(cotangent_aval(variable.aval))

    def accum(self, ct: Value) -> None:
        """Add to the cotangent."""
        if none_if_zero(ct) is None:
            return
        check_cotangent(self.eqn, self.variable, ct)
        earlier = none_if_zero(self.val)
        self.val = ct if earlier is None else add([earlier, ct])

    def total(self) -> Value:
        """Return the cotangent; None if nothing was added."""
        return none_if_zero(self.freeze())


class HiPrimitive(Structured):
    """The rule of `call_hi_primitive`."""

    calls_user_function: ClassVar[bool] = True

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        blocking = [v.aval for v in eqn.outvars if any(active) and blocks_derivatives(v.aval)]
        if blocking:
            raise NotDifferentiable(
                f"derivative of {operation_name(eqn)}",
                f"it returns a value of type {type(blocking[0]).__name__}, which has no tangents",
                frame(eqn),
                "give the type to_tangent_aval, vspace_zero and vspace_add, or differentiate with "
                "respect to other arguments",
            )
        outs, prim = super().active(eqn, active), eqn.params["_prim"]
        if jax_class_name(prim) == "CustomJVPTraced" and prim.symbolic_zeros:
            cache = program(prim.traced.jaxpr).cache
            return _outputs_with_tangent(self.jvp, eqn, active, outs, cache)
        return outs

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        prim = eqn.params["_prim"]
        if _is_custom_vjp(prim):
            raise no_forward_mode(frame(eqn))
        rule = (
            _jvp if defines_rule(prim, "jvp") else _linearize if defines_rule(prim, "lin") else None
        )
        if rule is None:
            raise _missing_method(eqn, "push tangents: it has neither jvp nor lin")
        return rule(prim, xs, with_jax_zeros(dxs, eqn.invars, tangent_aval))

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        prim = eqn.params["_prim"]
        has_forward_mode = defines_rule(prim, "jvp") or defines_rule(prim, "lin")
        if defines_rule(prim, "vjp_fwd") and (_is_custom_vjp(prim) or not has_forward_mode):
            reverse = self._reverse(eqn, xs, tuple(dx is not None for dx in dxs))
            return refuse_push(*reverse, dxs, frame(eqn))
        if defines_rule(prim, "lin"):
            return _linearize(prim, xs, with_jax_zeros(dxs, eqn.invars, tangent_aval))
        return self.jvp(eqn, xs, dxs)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        if not defines_rule(eqn.params["_prim"], "vjp_fwd"):
            push = lambda xs, dxs: self.split(eqn, xs, dxs, wanted)
            return pull_of_jvp(push, xs, active, wanted)
        ys, residuals, pull = self._reverse(eqn, xs, active)
        return ys, functools.partial(pull, residuals)

    def _reverse(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask):
        """Call the object's rules for reverse mode; return outputs, residuals, and the pullback.

        The pullback is a function of residuals and cotangents.
        """
        prim = eqn.params["_prim"]
        if any(active[: _closed_over(prim)]):
            raise closes_over_active(frame(eqn))
        inputs = prim.in_tree.unflatten(indexable(xs))
        # `vjp_fwd` may also return which outputs have a derivative, and structured residuals.
        y, residual_tree, *rest = prim.vjp_fwd(prim.in_tree.unflatten(active), *inputs)
        has_derivative = _flags(rest[0] if rest else True, prim.out_tree)
        residuals, tree = jax.tree.flatten((residual_tree, *rest[1:2]))

        def pull(residuals: Sequence[Value], cts: Sequence[Value]) -> list[Value]:
            pairs = zip(cts, has_derivative, strict=True)
            given = group_cotangents([ct if on else None for ct, on in pairs])
            y = prim.out_tree.unflatten(with_jax_zeros(given, eqn.outvars, cotangent_aval))
            sums = _accumulators(eqn, active)
            entries = prim.vjp_bwd(*tree.unflatten(residuals), y, *prim.in_tree.unflatten(sums))
            _log(eqn, "vjp_bwd", entries)
            totals = [s.total() if on else None for s, on in zip(sums, active, strict=True)]
            # As in JAX, the rule that computed an input is called even for a zero cotangent.
            return [RULE_RETURNED_NONE if on and ct is None else ct
                    for ct, on in zip(totals, active, strict=True)]  # fmt: skip

        residuals = indexable(list(map(residual_for_rule, residuals)))
        return list(prim.out_tree.flatten_up_to(y)), residuals, pull

    def transposed(
        self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask
    ) -> tuple[list[Value], Pull]:
        prim = eqn.params["_prim"]
        if not defines_rule(prim, "transpose"):
            if defines_rule(prim, "vjp_fwd"):
                return self.vjp(eqn, xs, active, wanted)
            # The jvp of the object is no help: it binds the object again for the tangents. So the
            # object's function is traced here, and its operations are transposed.
            run = lambda *xs: prim.out_tree.flatten_up_to(prim.expand(*prim.in_tree.unflatten(xs)))
            return pullback(trace(run, *map(jax.typeof, xs)), active, wanted, xs, linear=True)

        def pull(cts: Sequence[Value]) -> list[Value]:
            y = prim.out_tree.unflatten(with_jax_zeros(cts, eqn.outvars, cotangent_aval))
            sums = _accumulators(eqn, active)
            given = [s if on else x for s, x, on in zip(sums, xs, active, strict=True)]
            _log(eqn, "transpose", prim.transpose(y, *prim.in_tree.unflatten(given)))
            return [s.total() if on else None for s, on in zip(sums, active, strict=True)]

        return apply(eqn, xs), pull


def _is_custom_vjp(prim: Any) -> bool:
    return jax_class_name(prim) == "CustomVJPTraced"


def _closed_over(prim: Any) -> int:
    """Return how many leading inputs of a `custom_vjp` its function closes over."""
    leading = _is_custom_vjp(prim) and hasattr(prim, "drop_fwd_consts")
    return len(jax.tree.leaves(prim.in_avals[0])) if leading else 0


def _jvp(prim: Any, xs: Sequence[Value], dxs: Sequence[Value]):
    """Push tangents by the object's `jvp`; return outputs and tangents."""
    ys, dys = prim.jvp(prim.in_tree.unflatten(indexable(xs)), prim.in_tree.unflatten(dxs))
    return _outputs(prim, ys, dys)


def _linearize(prim: Any, xs: Sequence[Value], dxs: Sequence[Value]):
    """Push tangents by the object's `lin` and `linearized`; return outputs and tangents."""
    on = prim.in_tree.unflatten([none_if_zero(dx) is not None for dx in dxs])
    ys, residuals, *rest = prim.lin(on, *prim.in_tree.unflatten(indexable(xs)))
    dys = prim.linearized(residuals, *rest[1:2], *prim.in_tree.unflatten(dxs))
    return _outputs(prim, ys, dys)


def _outputs(prim: Any, ys: Any, dys: Any) -> tuple[list[Value], list[Value]]:
    """Flatten outputs and tangents; a tangent that is zero becomes None."""
    flat = prim.out_tree.flatten_up_to
    return list(flat(ys)), list(map(none_if_zero, flat(dys)))


def _accumulators(eqn: JaxprEqn, active: Mask) -> list[Any]:
    """Return an accumulator for each input. Those of inactive inputs discard what they get."""
    return [
        _Sum(eqn, v) if on else NullAccum(cotangent_aval(v.aval))
        for v, on in zip(eqn.invars, active, strict=True)
    ]


def _flags(flags: Any, tree: Any) -> list[bool]:
    """Return a bool for each leaf of a tree, from a tree of flags that is a prefix of it."""
    flag_of_leaf: list[bool] = []
    leaves = tree.unflatten(range(tree.num_leaves))
    jax.tree.map(lambda on, part: flag_of_leaf.extend([bool(on)] * len(jax.tree.leaves(part))),
                 flags, leaves)  # fmt: skip
    return flag_of_leaf


def _log(eqn: JaxprEqn, method: str, entries: Any) -> None:
    """Log the dict that a rule returned. A rule for reverse mode returns a dict to log, or None.

    Raises WrongCotangent for anything else: the rule has to add cotangents to its accumulators.
    """
    if entries is not None and not isinstance(entries, dict):
        raise WrongCotangent(
            f"pullback of {operation_name(eqn)}",
            f"its {method} returned a {type(entries).__name__} instead of adding to its "
            "accumulators",
            frame(eqn),
            f"call accum on the arguments of {method}, or write vjp_bwd_retval",
        )
    log(entries, operation_name(eqn), frame(eqn))


def _missing_method(eqn: JaxprEqn, what: str) -> NotDifferentiable:
    """Return the error for an operation class without the needed method."""
    return NotDifferentiable(
        f"derivative of {operation_name(eqn)}",
        f"its class has no method to {what}",
        frame(eqn),
        "add such a method to the class, or wrap the call in jax.custom_jvp",
    )


def _outputs_with_tangent(jvp: Callable[..., Any], eqn: JaxprEqn, active: Mask, outs: Mask,
                         cache: dict[Any, Any]) -> Mask:  # fmt: skip
    """Return which of the outputs `outs` get a tangent from a user's jvp rule.

    A rule that takes symbolic zeros may also return them. To find out, the rule is traced once, and
    the answer is kept in `cache`.
    """
    if any(outs) and ("tangents", active) not in cache:
        cache["tangents", active] = _trace_tangents(jvp, eqn, active, outs)
    return cache["tangents", active] if any(outs) else outs


def _trace_tangents(jvp: Callable[..., Any], eqn: JaxprEqn, active: Mask, outs: Mask) -> Mask:
    """Trace a jvp rule with tangents for `active` inputs; return which `outs` get a tangent."""
    has_tangent: list[bool] = []

    def push(*values: Value) -> list[Value]:
        n = len(active)
        _, dys = jvp(eqn, values[:n], spread(values[n:], active))
        has_tangent[:] = [dy is not None for dy in dys]
        return gather(dys, has_tangent)

    avals = [v.aval for v in eqn.invars]
    try:
        trace(push, *avals, *map(tangent_aval, gather(avals, active)))
    except Exception:  # a rule that fails raises again where its derivative is needed
        return outs
    return tuple(a and b for a, b in zip(outs, has_tangent, strict=True))


declare(HiPrimitive, "call_hi_primitive", "structured", (),
        Traits(calls="custom"), supported_params=("_prim",))  # fmt: skip
