"""Operations and types that are Python objects (`jax.experimental.hijax`), for every JAX version.

A *HiPrim* is an object that stands for an operation. In a jaxpr it is the parameter `_prim` of an
equation of `call_hi_primitive`. A *HiType* is a type of values that are not arrays. Libraries may
define both. JAX is converting some of its own operations to such objects: remat regions
(`jax_remat3`) and checkpoint names. xform converts these back to the primitives that they replace
(`lower_equation`), so rules, passes and policies see only primitives.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import hijax

from xform._jax import AbstractToken, JaxprEqn, Primitive, jaxpr_and_consts, name_p, primitive_named
from xform._jax.operation_objects import DERIVED_RULES, HiPrim
from xform.errors import UnsupportedParam
from xform.program.nested import map_equations
from xform.program.source import frame

# HiType's own method, which raises an error. A class that inherits it defines no tangent type.
_NO_TANGENT = hijax.HiType.to_tangent_aval

_HI_CALL: Any = primitive_named("call_hi_primitive")
_REMAT: Any = primitive_named("remat2")
_REGION_PARAMS = {"jaxpr", "policy", "prevent_cse"}


def is_differentiable_hitype(aval: Any) -> bool:
    """Return whether a type is a HiType that has tangents other than float0."""
    defined = isinstance(aval, hijax.HiType) and type(aval).to_tangent_aval is not _NO_TANGENT
    return defined and getattr(aval.to_tangent_aval(), "dtype", None) != jax.dtypes.float0


def blocks_derivatives(aval: Any) -> bool:
    """Return whether a type is not an array type and has no tangents.

    A token is not counted, because it never carries a derivative.
    """
    if hasattr(aval, "dtype") or isinstance(aval, AbstractToken):
        return False
    if isinstance(aval, hijax.HiType):
        return type(aval).to_tangent_aval is _NO_TANGENT
    return not hasattr(aval.to_tangent_aval(), "dtype")


def jax_class_name(prim: Any) -> str:
    """Return the class name of an operation object of JAX; "" for one of another library."""
    cls = type(prim)
    return cls.__name__ if cls.__module__.startswith("jax.") else ""


def operation_name(eqn: JaxprEqn) -> str:
    """Return the name of an equation's primitive, or of the class of its operation object."""
    prim = eqn.params.get("_prim")
    return type(prim).__name__ if isinstance(prim, HiPrim) else eqn.primitive.name


def defines_rule(prim: Any, method: str) -> bool:
    """Return whether the class of an operation object defines the rule `method` itself."""
    rule = getattr(type(prim), method, None)
    inherited = getattr(HiPrim, method, None)
    return rule is not None and rule is not inherited and rule not in DERIVED_RULES


def lower_operation(
    primitive: Primitive, params: dict[str, Any]
) -> tuple[Primitive, dict[str, Any]]:
    """Convert an operation object of JAX to the primitive and parameters that it replaces.

    Any other operation is returned unchanged.
    """
    prim = params["_prim"] if primitive is _HI_CALL else None
    if prim is None:
        return primitive, params
    match jax_class_name(prim):
        case "CheckpointName" | "CheckpointNameFwd":
            return name_p, {"name": prim.params["name"]}
        case "RematTraced":
            return _REMAT, _remat_params(prim.params)
        case _:
            return primitive, params


def _remat_params(params: dict[str, Any]) -> dict[str, Any]:
    """Convert the parameters of a remat region object to those of the primitive `remat2`."""
    jaxpr, consts = jaxpr_and_consts(params["jaxpr"])
    unsupported = [*(f"parameter {name!r}" for name in params.keys() - _REGION_PARAMS),
                   *(f"constant {jax.typeof(c).str_short()}" for c in consts)]  # fmt: skip
    if unsupported:
        raise UnsupportedParam(
            "derivative of a jax.checkpoint region",
            f"it has a {unsupported[0]}, which xform does not support for regions under jax_remat3",
            frame(),
            "use xform.checkpoint for the region, or turn off the flag jax_remat3",
        )
    return {
        "jaxpr": jaxpr,
        "policy": params["policy"],
        "prevent_cse": params.get("prevent_cse", True),
        "differentiated": False,
    }


def lower_equation(eqn: JaxprEqn) -> JaxprEqn:
    """Convert an equation of an operation object to one of the primitive that the object replaces.

    Any other equation is returned unchanged.
    """
    primitive, params = lower_operation(eqn.primitive, eqn.params)
    if primitive is eqn.primitive:
        return eqn
    return eqn.replace(primitive=primitive, params=params)


def lower_all(jaxpr: Any) -> Any:
    """Apply `lower_equation` to all equations of a jaxpr and of nested ones.

    A jaxpr without operation objects is returned unchanged.
    """
    return map_equations(jaxpr, lower_equation)
