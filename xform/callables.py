"""What a user's function says of itself: its arguments' names, its line, what transform made it."""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from xform.errors import WrongArgument


@dataclasses.dataclass(frozen=True)
class Derived:
    """That a function is what a transform of xform made.

    Attributes:
      transform: such as "grad".
      argnums: position or positions of the arguments that are differentiated.
      policy: as it was given; None is the default.
    """

    transform: str
    argnums: Any
    policy: Any


_DERIVED: weakref.WeakKeyDictionary[Any, Derived] = weakref.WeakKeyDictionary()


def mark(f: Callable[..., Any], transform: str, argnums: Any, policy: Any) -> None:
    """Remember that a transform of xform made `f`."""
    _DERIVED[f] = Derived(transform, argnums, policy)


def derived(f: Any) -> Derived | None:
    """What transform of xform made a function, which `jax.jit` may have compiled since.

    >>> import xform
    >>> from xform.callables import derived
    >>> derived(jax.jit(xform.grad(jnp.sin))).transform, derived(jnp.sin)
    ('grad', None)
    """
    while hasattr(f, "lower") and hasattr(f, "__wrapped__"):
        f = f.__wrapped__
    try:
        return _DERIVED.get(f)
    except TypeError:  # it has no weak references, or no hash
        return None


def function_name(f: Any) -> str:
    """What a function is called; of an object that has no name, its class.

    >>> import functools
    >>> from xform.callables import function_name
    >>> function_name(jnp.mean), function_name(functools.partial(jnp.mean))
    ('mean', 'partial')
    """
    return getattr(f, "__name__", type(f).__name__)


def argument_names(f: Callable[..., Any], n: int) -> list[str]:
    """What a function calls its first `n` positional arguments.

    >>> from xform.callables import argument_names
    >>> argument_names(lambda w, *xs: w, 3)
    ['w', 'xs[0]', 'xs[1]']
    """
    try:
        bound = inspect.signature(f).bind_partial(*range(n)).arguments
    except (TypeError, ValueError):
        return [f"argument {i}" for i in range(n)]
    several = ([f"{k}[{i}]" for i in range(len(v))] if isinstance(v, tuple) else [k]
               for k, v in bound.items())  # fmt: skip
    return [name for names in several for name in names]


def takes_policy(f: Callable[..., Any], n: int) -> bool:
    """Whether a function has an argument `policy` that is not among its first `n` positional ones.

    >>> from xform.callables import takes_policy
    >>> takes_policy(lambda x, policy=None: x, 1), takes_policy(lambda x: x, 1)
    (True, False)
    """
    try:
        signature = inspect.signature(f)
        return "policy" in signature.parameters.keys() - signature.bind_partial(*range(n)).arguments
    except (TypeError, ValueError):  # it has no signature, or not this one: its call says so
        return False


def written(f: Any) -> str:
    """`file:line (function)` where a function was written; empty if that is not known."""
    code = getattr(inspect.unwrap(f), "__code__", None) if callable(f) else None
    return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})" if code else ""


def check_callable(f: Any, asked: str) -> None:
    """Refuse what is no function, and what returns something else than its value when called."""
    if not callable(f):
        raise WrongArgument(asked, f"{f!r} is not callable", "", "pass a function of arrays")
    if inspect.isgeneratorfunction(f) or inspect.iscoroutinefunction(f):
        kind = "generator" if inspect.isgeneratorfunction(f) else "coroutine"
        raise WrongArgument(
            asked,
            f"{getattr(f, '__name__', 'it')} is a {kind} function: a call of it returns no arrays",
            written(f),
            "pass a function that returns arrays, where this one has yield or async",
        )
