"""Apply a function to all equations of a jaxpr, the equations of nested jaxprs included."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from xform._jax import JaxprEqn


def map_equations(jaxpr: Any, f: Callable[[JaxprEqn], JaxprEqn]) -> Any:
    """Return a Jaxpr or ClosedJaxpr with `f` applied to all equations, nested ones included.

    `f` gets an equation before its nested jaxprs are mapped. A jaxpr whose equations `f` returns
    unchanged is returned itself.
    """
    body = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
    eqns = [map_equation(eqn, f) for eqn in body.eqns]
    if all(map(operator.is_, eqns, body.eqns)):
        return jaxpr
    mapped = body.replace(eqns=eqns)
    return mapped if body is jaxpr else jaxpr.replace(jaxpr=mapped)


def map_equation(eqn: JaxprEqn, f: Callable[[JaxprEqn], JaxprEqn]) -> JaxprEqn:
    """Apply `f` to an equation, then to all equations of the jaxprs among its parameters."""
    eqn = f(eqn)
    inside = lambda x: map_equations(x, f) if hasattr(x, "eqns") else x
    changed: dict[str, Any] = {}
    for name, value in eqn.params.items():
        parts = value if isinstance(value, tuple) else (value,)
        new = tuple(map(inside, parts))
        if not all(map(operator.is_, new, parts)):
            changed[name] = new if isinstance(value, tuple) else new[0]
    return eqn.replace(params=eqn.params | changed) if changed else eqn
