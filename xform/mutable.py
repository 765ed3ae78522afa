"""Types of values that are read and written where they are, such as hijax Variables of Flax.

Such a type does not say what the value holds now, which operations on it are traced with: JAX keeps
that beside the type. JAX 0.12 has no such types.
"""

from __future__ import annotations

from typing import Any

from jax import api_util, experimental
from jax.experimental import hijax

_Held: Any = getattr(hijax, "AvalQDD", None)
_current: Any = getattr(experimental, "cur_qdd", None)


def is_mutable(aval: Any) -> bool:
    """Whether a type is that of a mutable value."""
    return getattr(aval, "has_qdd", False)


def argument_type(x: Any) -> Any:
    """The type to trace a function of `x` with, a value or a type, and what it holds now."""
    if _Held and isinstance(x, _Held):
        return x
    aval = api_util.shaped_abstractify(x)
    return _Held(aval, _current(x)) if is_mutable(aval) else aval


def input_type(v: Any) -> Any:
    """The same of a variable that is an input, and what it holds first."""
    return _Held(v.aval, v.initial_qdd) if is_mutable(v.aval) else v.aval


def type_alone(aval: Any) -> Any:
    """A type without what a value of it holds."""
    return aval.aval if _Held and isinstance(aval, _Held) else aval
