"""Types of mutable values, such as Flax Variables in hijax mode.

The type of a mutable value does not describe its current content. A trace needs the type of the
content too. JAX 0.10 has both together in an `AvalQDD`, where QDD means "quasi-dynamic data".
JAX 0.12 has no such types.
"""

from __future__ import annotations

from typing import Any

from jax import api_util, experimental
from jax.experimental import hijax
from jax.ref import AbstractRef

_TypeAndContent: Any = getattr(hijax, "AvalQDD", None)
_current: Any = getattr(experimental, "cur_qdd", None)


def is_mutable(aval: Any) -> bool:
    """Return whether values of a type are mutable."""
    return getattr(aval, "has_qdd", False)


def argument_type(x: Any) -> Any:
    """Return the type to trace a function with, for an argument `x`, a value or a type."""
    if _TypeAndContent and isinstance(x, _TypeAndContent):
        return x
    aval = api_util.shaped_abstractify(x)
    return _TypeAndContent(aval, _current(x)) if is_mutable(aval) else aval


def input_type(v: Any) -> Any:
    """Return the type to trace a function with again, for an input variable of a jaxpr."""
    return _TypeAndContent(v.aval, v.initial_qdd) if is_mutable(v.aval) else v.aval


def drop_content(aval: Any) -> Any:
    """Return the type `aval`, without the type of the content if it has one."""
    return aval.aval if _TypeAndContent and isinstance(aval, _TypeAndContent) else aval


def reference_type(aval: Any) -> Any:
    """Return the type of a mutable reference to a value of type `aval`."""
    return AbstractRef(aval)
