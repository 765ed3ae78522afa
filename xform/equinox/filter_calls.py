"""Accept the calls that Equinox's transforms accept: as decorators, and of methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx

Function = Callable[..., Any]
D = TypeVar("D", bound=Function)


class TransformedFunction(eqx.Module):
    """A transformed function: a pytree like the function itself, and usable as a method."""

    _fun: Any

    @property
    def __wrapped__(self) -> Function:
        return self._fun

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        bound: Any = self
        return self if instance is None else eqx.Partial(bound, instance)


def accepts_options_only(transform: D) -> D:
    """Let a transform return a decorator if it is called with options only.

    The function that it returns gets the name and the docstring of the given function.
    """

    @functools.wraps(transform)
    def call(fun: Function | None = None, *args: Any, **options: Any) -> Any:
        if fun is None:
            return functools.partial(call, *args, **options)
        return eqx.module_update_wrapper(transform(fun, *args, **options))

    return call  # pyright: ignore[reportReturnType]
