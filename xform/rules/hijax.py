"""Objects with their own derivatives (`jax.experimental.hijax`): their methods are called.

An object may have `vjp_fwd` with `vjp_bwd` or `vjp_bwd_retval`, `jvp`, `lin` with `linearized`, and
`transpose`. If JAX derives one of these from another by autodiff, xform derives it by its own
autodiff. JAX's newer `custom_vjp` is such an object, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from xform._jax import JaxprEqn, cotangent_aval, tangent_aval
from xform.errors import NotDifferentiable, WrongCotangent
from xform.interpret.absent import group_cotangents
from xform.interpret.logs import log
from xform.interpret.node import Pull, Structured
from xform.interpret.pullback import RULE_RETURNED_NONE, check_cotangent, pull_of_jvp, pullback
from xform.program.arithmetic import Value, add
from xform.program.hijax import (
    NullAccum,
    ValAccum,
    blocks_derivatives,
    defines_rule,
    jax_class_name,
    operation_name,
)
from xform.program.ir import Mask, apply, program, trace
from xform.program.source import frame
from xform.registry.table import declare
from xform.registry.traits import Traits
from xform.rules.custom import (
    closes_over,
    indexable,
    moving_outputs,
    no_forward_mode,
    none_if_zero,
    number,
    refuse_push,
    with_zeros,
)


class _Sum(ValAccum):
    """Accumulates an active input's cotangent, for rules that add to it and return nothing."""

    def __init__(self, eqn: JaxprEqn, variable: Any):
        self.eqn, self.variable = eqn, variable
        super().__init__(cotangent_aval(variable.aval))

    def accum(self, ct: Value) -> None:
        """Add to the cotangent."""
        if none_if_zero(ct) is None:
            return
        check_cotangent(self.eqn, self.variable, ct)
        before = none_if_zero(self.val)
        self.val = ct if before is None else add([before, ct])

    def total(self) -> Value:
        """Return the cotangent; None if nothing was added."""
        return none_if_zero(self.freeze())


class HiPrimitive(Structured):
    """The rule of `call_hi_primitive`."""

    calls_user_function: ClassVar[bool] = True

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        lost = [v.aval for v in eqn.outvars if blocks_derivatives(v.aval)] if any(active) else []
        if lost:
            raise NotDifferentiable(
                f"derivative of {operation_name(eqn)}",
                f"it returns a value of type {type(lost[0]).__name__}, which has no tangents",
                frame(eqn),
                "give the type to_tangent_aval, vspace_zero and vspace_add, or differentiate with "
                "respect to other arguments",
            )
        outs, prim = super().active(eqn, active), eqn.params["_prim"]
        if jax_class_name(prim) == "CustomJVPTraced" and prim.symbolic_zeros:
            return moving_outputs(self.jvp, eqn, active, outs, program(prim.traced.jaxpr).cache)
        return outs

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        prim = eqn.params["_prim"]
        if _is_custom_vjp(prim):
            raise no_forward_mode(frame(eqn))
        rule = (
            _jvp if defines_rule(prim, "jvp") else _linearize if defines_rule(prim, "lin") else None
        )
        if rule is None:
            raise _refusal(eqn, "push tangents: it has neither jvp nor lin")
        return rule(prim, xs, with_zeros(dxs, eqn.invars, tangent_aval))

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask):
        prim = eqn.params["_prim"]
        pushes = defines_rule(prim, "jvp") or defines_rule(prim, "lin")
        if defines_rule(prim, "vjp_fwd") and (_is_custom_vjp(prim) or not pushes):
            reverse = self._reverse(eqn, xs, tuple(dx is not None for dx in dxs))
            return refuse_push(*reverse, dxs, frame(eqn))
        if defines_rule(prim, "lin"):
            return _linearize(prim, xs, with_zeros(dxs, eqn.invars, tangent_aval))
        return self.jvp(eqn, xs, dxs)

    def vjp(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask):
        if not defines_rule(eqn.params["_prim"], "vjp_fwd"):
            push = functools.partial(self._pushed, eqn, wanted)
            return pull_of_jvp(push, xs, active, wanted)
        ys, residuals, pull = self._reverse(eqn, xs, active)
        return ys, functools.partial(pull, residuals)

    def _pushed(self, eqn: JaxprEqn, wanted: Mask, xs: Sequence[Value], dxs: Sequence[Value]):
        return self.split(eqn, xs, dxs, wanted)

    def _reverse(self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask):
        """Call the object's rules for reverse mode; return outputs, residuals, and the pullback."""
        prim = eqn.params["_prim"]
        if any(active[: _closed_over(prim)]):
            raise closes_over(frame(eqn))
        inputs = prim.in_tree.unflatten(indexable(xs))
        y, held, *rest = prim.vjp_fwd(prim.in_tree.unflatten(active), *inputs)
        moving = _flags(rest[0] if rest else True, prim.out_tree)
        structured = rest[1:2]
        residuals, tree = jax.tree.flatten((held, *structured))

        def pull(residuals: Sequence[Value], cts: Sequence[Value]) -> list[Value]:
            given = group_cotangents(
                [ct if on else None for ct, on in zip(cts, moving, strict=True)]
            )
            y = prim.out_tree.unflatten(with_zeros(given, eqn.outvars, cotangent_aval))
            sums = _accumulators(eqn, active)
            entries = prim.vjp_bwd(*tree.unflatten(residuals), y, *prim.in_tree.unflatten(sums))
            _log(eqn, "vjp_bwd", entries)
            totals = [s.total() if on else None for s, on in zip(sums, active, strict=True)]
            # As in JAX, the rule that computed an input is called even for a zero cotangent.
            return [RULE_RETURNED_NONE if on and ct is None else ct
                    for ct, on in zip(totals, active, strict=True)]  # fmt: skip

        residuals = indexable(list(map(number, residuals)))
        return list(prim.out_tree.flatten_up_to(y)), residuals, pull

    def transposed(
        self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask
    ) -> tuple[list[Value], Pull]:
        prim = eqn.params["_prim"]
        if not defines_rule(prim, "transpose"):
            if defines_rule(prim, "vjp_fwd"):
                return self.vjp(eqn, xs, active, wanted)
            # Its jvp binds the object again for the tangents, so its operations are transposed.
            run = lambda *xs: prim.out_tree.flatten_up_to(prim.expand(*prim.in_tree.unflatten(xs)))
            return pullback(trace(run, *map(jax.typeof, xs)), active, wanted, xs, linear=True)

        def pull(cts: Sequence[Value]) -> list[Value]:
            y = prim.out_tree.unflatten(with_zeros(cts, eqn.outvars, cotangent_aval))
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
    ys, dys = prim.jvp(prim.in_tree.unflatten(indexable(xs)), prim.in_tree.unflatten(dxs))
    return _outputs(prim, ys, dys)


def _linearize(prim: Any, xs: Sequence[Value], dxs: Sequence[Value]):
    on = prim.in_tree.unflatten([none_if_zero(dx) is not None for dx in dxs])
    ys, held, *rest = prim.lin(on, *prim.in_tree.unflatten(indexable(xs)))
    dys = prim.linearized(held, *rest[1:2], *prim.in_tree.unflatten(dxs))
    return _outputs(prim, ys, dys)


def _outputs(prim: Any, ys: Any, dys: Any) -> tuple[list[Value], list[Value]]:
    flat = prim.out_tree.flatten_up_to
    return list(flat(ys)), list(map(none_if_zero, flat(dys)))


def _accumulators(eqn: JaxprEqn, active: Mask) -> list[Any]:
    """Return an accumulator for each input; for an inactive input it discards its values."""
    return [
        _Sum(eqn, v) if on else NullAccum(cotangent_aval(v.aval))
        for v, on in zip(eqn.invars, active, strict=True)
    ]


def _flags(flags: Any, tree: Any) -> list[bool]:
    """Return a bool for each leaf of a tree, from a tree of flags that is a prefix of it."""
    leaves: list[bool] = []
    places = tree.unflatten(range(tree.num_leaves))
    jax.tree.map(lambda on, part: leaves.extend([bool(on)] * len(jax.tree.leaves(part))),
                 flags, places)  # fmt: skip
    return leaves


def _log(eqn: JaxprEqn, method: str, entries: Any) -> None:
    """Log what a rule that adds to accumulators returned: a dict, or None."""
    if entries is not None and not isinstance(entries, dict):
        raise WrongCotangent(
            f"pullback of {operation_name(eqn)}",
            f"its {method} returned a {type(entries).__name__} instead of adding to its "
            "accumulators",
            frame(eqn),
            f"call accum on the arguments of {method}, or write vjp_bwd_retval",
        )
    log(entries, operation_name(eqn), frame(eqn))


def _refusal(eqn: JaxprEqn, what: str) -> NotDifferentiable:
    """Return the error for an operation class without the needed method."""
    return NotDifferentiable(
        f"derivative of {operation_name(eqn)}",
        f"its class has no method to {what}",
        frame(eqn),
        "add such a method to the class, or wrap the call in jax.custom_jvp",
    )


declare(HiPrimitive, "call_hi_primitive", "structured", (),
        Traits(calls="custom"), known=("_prim",))  # fmt: skip
