"""Primitives of `jax.experimental.hijax`: objects that bring their own derivatives.

JAX's own newer custom_vjp and checkpoint are such objects. A checkpoint region is treated as one;
of all others the methods are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xform._jax import JaxprEqn, ad, cotangent_aval, name_p
from xform.arithmetic import Value, add, differentiable, instantiate
from xform.interpret.activity import path
from xform.interpret.joint import analyze
from xform.interpret.jvp import jvp
from xform.interpret.node import Node, Pull, Structured
from xform.ir import Mask, Program, program
from xform.rules.call import RegionNode
from xform.rules.custom import none_if_zero
from xform.table import declare
from xform.traits import Traits


def _region(prim: Any) -> Program | None:
    """The program of a checkpoint region."""
    return program(prim.params["jaxpr"]) if {"jaxpr", "policy"} == set(prim.params) else None


def _name(prim: Any) -> str | None:
    """The name that a `checkpoint_name` gives to its argument."""
    return prim.params["name"] if set(prim.params) == {"name"} else None


class _Sum:
    """Where a method that returns nothing leaves the cotangent of an input."""

    def __init__(self, aval: Any):
        self.aval, self.value = aval, None

    def accum(self, ct: Value) -> None:
        """Add to the cotangent."""
        if none_if_zero(ct) is not None:
            self.value = ct if self.value is None else add([self.value, ct])


class HiPrimitive(Structured):
    """`call_hi_primitive`."""

    def active(self, eqn: JaxprEqn, active: Mask) -> Mask:
        inner = _region(eqn.params["_prim"])
        if inner is not None:
            return path(inner, active).outputs
        return tuple(any(active) and differentiable(v.aval) for v in eqn.outvars)

    def jvp(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value]):
        prim = eqn.params["_prim"]
        inner = _region(prim)
        if inner is not None:
            return jvp(inner, xs, dxs)
        if _name(prim) is not None:
            return [name_p.bind(*xs, name=_name(prim))], dxs
        full = instantiate(dxs, eqn.invars)
        ys, dys = prim.jvp(prim.in_tree.unflatten(xs), prim.in_tree.unflatten(full))
        flat = prim.out_tree.flatten_up_to
        return flat(ys), [none_if_zero(dy) for dy in flat(dys)]

    def split(self, eqn: JaxprEqn, xs: Sequence[Value], dxs: Sequence[Value], wanted: Mask) -> Any:
        if _region(eqn.params["_prim"]) is not None:
            return super().split(eqn, xs, dxs, wanted)
        return self.jvp(eqn, xs, dxs)

    def node(self, eqn: JaxprEqn, active: Mask, wanted: Mask, push: bool) -> Node:
        prim = eqn.params["_prim"]
        joint = analyze(program(prim.params["jaxpr"]), active, wanted, push)
        return RegionNode(eqn, joint, push, prim.params["policy"], True)

    def vjp(
        self, eqn: JaxprEqn, xs: Sequence[Value], active: Mask, wanted: Mask
    ) -> tuple[list[Value], Pull]:
        prim = eqn.params["_prim"]
        if _region(prim) is not None:
            return super().vjp(eqn, xs, active, wanted)
        if _name(prim) is not None:
            return [name_p.bind(*xs, name=_name(prim))], list
        inputs, outputs = prim.in_tree, prim.out_tree
        y, residuals, *_ = prim.vjp_fwd(inputs.unflatten(active), *inputs.unflatten(xs))

        def pull(cts: Sequence[Value]) -> list[Value]:
            full = outputs.unflatten(
                ad.Zero(cotangent_aval(v.aval)) if ct is None else ct
                for ct, v in zip(cts, eqn.outvars, strict=True)
            )
            if "vjp_bwd" not in vars(type(prim)):
                leaves = inputs.flatten_up_to(prim.vjp_bwd_retval(residuals, full))
                return [
                    none_if_zero(ct) if on else None for ct, on in zip(leaves, active, strict=True)
                ]
            sums = [_Sum(cotangent_aval(v.aval)) for v in eqn.invars]
            prim.vjp_bwd(residuals, full, *inputs.unflatten(sums))
            return [s.value for s in sums]

        return list(outputs.flatten_up_to(y)), pull


declare(HiPrimitive, "call_hi_primitive", "structured", (),
        Traits(calls="custom"), known=("_prim",))  # fmt: skip
