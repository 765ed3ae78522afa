"""Facts about a user's function: argument names, source line, the transform that returned it.

Messages and reports use them to name what the user passed.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from xform.errors import WrongArgument


@dataclasses.dataclass(frozen=True)
class TransformRecord:
    """The transform of xform that returned a function.

    Attributes:
      transform: its name, such as "grad".
      argnums: position or positions of the differentiated arguments.
      policy: the argument `policy` of the transform; None is the default.
    """

    transform: str
    argnums: Any
    policy: Any


# The record of each function that a transform returned, for as long as the function lives.
_RECORDS: weakref.WeakKeyDictionary[Any, TransformRecord] = weakref.WeakKeyDictionary()


def record_transform(f: Callable[..., Any], transform: str, argnums: Any, policy: Any) -> None:
    """Record that a transform of xform returned `f`."""
    _RECORDS[f] = TransformRecord(transform, argnums, policy)


def transform_record(f: Any) -> TransformRecord | None:
    """Return the record of the transform that returned `f`; None if no transform of xform did.

    It is also found if `f` is wrapped in `jax.jit`.

    >>> import xform
    >>> from xform.introspection.callables import transform_record
    >>> transform_record(jax.jit(xform.grad(jnp.sin))).transform, transform_record(jnp.sin)
    ('grad', None)
    """
    while hasattr(f, "lower") and hasattr(f, "__wrapped__"):
        f = f.__wrapped__
    try:
        return _RECORDS.get(f)
    except TypeError:  # `f` has no weak references, or no hash
        return None


def function_name(f: Any) -> str:
    """Return the name of a function, or the class name of a callable object without a name.

    >>> import functools
    >>> from xform.introspection.callables import function_name
    >>> function_name(jnp.mean), function_name(functools.partial(jnp.mean))
    ('mean', 'partial')
    """
    return getattr(f, "__name__", type(f).__name__)


def argument_names(f: Callable[..., Any], n: int) -> list[str]:
    """Return the names of the first `n` positional arguments of a function.

    >>> from xform.introspection.callables import argument_names
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


def check_parameter(f: Callable[..., Any], n: int, name: str, request: str) -> None:
    """Raise an error unless `f` takes a keyword argument `name` besides `n` positional arguments.

    Raises:
      WrongArgument: no parameter has this name, or it is one of the first `n`.
    """
    try:
        signature = inspect.signature(f)
        signature.bind_partial(*range(n))
    except (TypeError, ValueError):  # no signature, or too few parameters: the call raises an error
        return
    try:
        signature.bind_partial(*range(n), **{name: None})
    except TypeError:
        called = function_name(f)
        raise WrongArgument(
            request,
            f"the parameter {name!r} of {called} is given by position already"
            if name in signature.parameters
            else f"{called} has no parameter {name!r}; its signature is {called}{signature}",
            definition_site(f),
            f"give {called} a keyword parameter of that name, or pass one that it has: "
            f"lambda *args, {name}: {called}(*args, other={name})",
        ) from None


def definition_site(f: Any) -> str:
    """Return the place where a function is defined, as `file:line (function)`; empty if unknown."""
    code = getattr(inspect.unwrap(f), "__code__", None) if callable(f) else None
    return f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})" if code else ""


def check_callable(f: Any, request: str) -> None:
    """Raise an error if `f` is not callable, or is a generator or coroutine function.

    `request` begins the message; it names what the user asked for, such as "grad".
    """
    if not callable(f):
        raise WrongArgument(request, f"{f!r} is not callable", "", "pass a function of arrays")
    if inspect.isgeneratorfunction(f) or inspect.iscoroutinefunction(f):
        kind = "generator" if inspect.isgeneratorfunction(f) else "coroutine"
        raise WrongArgument(
            request,
            f"{getattr(f, '__name__', 'it')} is a {kind} function: calling it returns a {kind}, "
            "not arrays",
            definition_site(f),
            "pass a function that returns arrays, without yield or async",
        )
