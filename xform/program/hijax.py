"""Operations that JAX represents as objects (`jax.experimental.hijax`), for every JAX version.

JAX is converting some of its own operations to such objects: remat regions (`jax_remat3`) and
checkpoint names. xform converts them back to the primitives that they replace, so rules, passes and
policies see only primitives.
"""

from __future__ import annotations

import operator
from typing import Any

import jax
from jax.experimental import hijax

from xform._jax import AbstractToken, JaxprEqn, Primitive, closed, name_p, named
from xform.errors import UnsupportedParam
from xform.program.source import frame

# The base class of the objects. JAX 0.10 has another name for it, and no public accumulators.
HiPrim: Any = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive")  # noqa: B009
_accumulators: Any = hijax if hasattr(hijax, "ValAccum") else HiPrim.vjp_bwd.__globals__["ad"]
ValAccum: Any = _accumulators.ValAccum
NullAccum: Any = _accumulators.NullAccum

_NO_TANGENT = hijax.HiType.to_tangent_aval

# Rules that JAX derives from another rule of the same object. They call JAX's own autodiff. Since
# JAX 0.12, the first three names are pairs of rules.
_DERIVATIONS = (
    "linearize_from_jvp", "vjp_from_jvp", "vjp_from_lin", "apply_derived_linearization",
    "vjp_fwd_from_jvp", "transpose_jvp", "vjp_fwd_from_lin", "transpose_linearized",
)  # fmt: skip
_derived = [getattr(hijax, name) for name in _DERIVATIONS if hasattr(hijax, name)]
_DERIVED = [x for d in _derived for x in (d if isinstance(d, tuple) else (d,))]

_CALL: Any = named("call_hi_primitive")
_REMAT: Any = named("remat2")
_REGION = {"jaxpr", "policy", "prevent_cse"}


def is_vector(aval: Any) -> bool:
    """Whether a type is a `HiType`, which a library defines, and has tangents."""
    has = isinstance(aval, hijax.HiType) and type(aval).to_tangent_aval is not _NO_TANGENT
    return has and getattr(aval.to_tangent_aval(), "dtype", None) != jax.dtypes.float0


def blocks_derivatives(aval: Any) -> bool:
    """Whether values of a type block derivatives: it is not an array type and has no tangents."""
    if hasattr(aval, "dtype") or isinstance(aval, AbstractToken):
        return False
    if isinstance(aval, hijax.HiType):
        return type(aval).to_tangent_aval is _NO_TANGENT
    return not hasattr(aval.to_tangent_aval(), "dtype")


def kind(prim: Any) -> str:
    """The class name of an operation object that JAX defines; empty for one of another library."""
    cls = type(prim)
    return cls.__name__ if cls.__module__.startswith("jax.") else ""


def operation(eqn: JaxprEqn) -> str:
    """The name of an equation's operation: the primitive, or the class of the operation object."""
    prim = eqn.params.get("_prim")
    return type(prim).__name__ if isinstance(prim, HiPrim) else eqn.primitive.name


def defines_rule(prim: Any, method: str) -> bool:
    """Whether the class of an operation object defines the rule `method` itself."""
    rule = getattr(type(prim), method, None)
    return rule is not None and rule is not getattr(HiPrim, method, None) and rule not in _DERIVED


def lower_operation(
    primitive: Primitive, params: dict[str, Any]
) -> tuple[Primitive, dict[str, Any]]:
    """Convert an operation object to the primitive it replaces; else return the arguments."""
    prim = params["_prim"] if primitive is _CALL else None
    if prim is None:
        return primitive, params
    match kind(prim):
        case "CheckpointName" | "CheckpointNameFwd":
            return name_p, {"name": prim.params["name"]}
        case "RematTraced":
            return _REMAT, _region(prim.params)
        case _:
            return primitive, params


def _region(params: dict[str, Any]) -> dict[str, Any]:
    """Convert the parameters of a remat region object to those of the primitive `remat2`."""
    jaxpr, consts = closed(params["jaxpr"])
    unknown = [*(f"parameter {name!r}" for name in params.keys() - _REGION),
               *(f"constant {jax.typeof(c).str_short()}" for c in consts)]  # fmt: skip
    if unknown:
        raise UnsupportedParam(
            "derivative of a jax.checkpoint region",
            f"it has a {unknown[0]}, which xform does not support for regions under jax_remat3",
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
    """Convert an equation of an operation object to one of the primitive that it replaces."""
    primitive, params = lower_operation(eqn.primitive, eqn.params)
    if primitive is eqn.primitive:
        return eqn
    return eqn.replace(primitive=primitive, params=params)


def lower_all(jaxpr: Any) -> Any:
    """Apply `lower_equation` to all equations of a jaxpr and of nested ones.

    A jaxpr without operation objects is returned unchanged.
    """
    body = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
    eqns = [_settle_nested(lower_equation(eqn)) for eqn in body.eqns]
    if all(map(operator.is_, eqns, body.eqns)):
        return jaxpr
    lowered = body.replace(eqns=eqns)
    return lowered if body is jaxpr else jaxpr.replace(jaxpr=lowered)


def _settle_nested(eqn: JaxprEqn) -> JaxprEqn:
    """Return an equation with the operation objects in its nested programs settled."""
    of = lambda x: lower_all(x) if hasattr(x, "eqns") else x
    changed: dict[str, Any] = {}
    for name, value in eqn.params.items():
        parts = value if isinstance(value, tuple) else (value,)
        new = tuple(map(of, parts))
        if not all(map(operator.is_, new, parts)):
            changed[name] = new if isinstance(value, tuple) else new[0]
    return eqn.replace(params=eqn.params | changed) if changed else eqn
