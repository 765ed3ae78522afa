"""Accept the calls that NNX's transforms accept: as decorators, and with keyword arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx

from xform.errors import WrongArgument

Function = Callable[..., Any]


def accepts_nnx_calls(n_required: int) -> Callable[[Function], Function]:
    """Decorate a transform of `xform.flax`, so that it accepts the same calls as NNX's transform.

    A call without the first `n_required` arguments returns a partial, which serves as a decorator.
    A bound method of a module raises `WrongArgument`, because its module would be held constant.
    """

    def decorate(transform: Function) -> Function:
        @functools.wraps(transform)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) + len(kwargs.keys() & {"f", "fun", "primals", "tangents"}) < n_required:
                return functools.partial(call, *args, **kwargs)
            inner: Any = args[0] if args else kwargs.get("f", kwargs.get("fun"))
            while isinstance(inner, functools.partial):
                inner = inner.func
            if inspect.ismethod(inner) and isinstance(inner.__self__, nnx.Module):
                owner = type(inner.__self__).__name__
                raise WrongArgument(
                    f"{transform.__name__} of {owner}.{inner.__name__}",
                    f"it is a method bound to a {owner}, which would be held constant",
                    "",
                    f"pass {owner}.{inner.__name__}, and the module as its first argument",
                )
            return transform(*args, **kwargs)

        return call

    return decorate


def positional(f: Function, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `(args, kwargs)` of a call with keyword arguments and defaults made positional.

    NNX counts `argnums` in this way. Arguments of a partial or a builtin are returned unchanged.
    """
    if isinstance(f, functools.partial):
        return args, kwargs
    try:
        bound = inspect.signature(f).bind(*args, **kwargs)
    except ValueError:  # a builtin
        return args, kwargs
    bound.apply_defaults()
    return bound.args, bound.kwargs
