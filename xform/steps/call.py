"""The types of a call of a jitted function: what JAX traces and compiles it for."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax

from xform.introspection.argnums import numbers


@dataclasses.dataclass(frozen=True, eq=False)
class StepCall:
    """The arguments that a step is planned for, as arrays or types, and when planning began."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    start: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """The time since planning began."""
        return time.perf_counter() - self.start


class StaticArguments:
    """Which arguments `jax.jit` treats as static, from its options and the function's signature.

    As in JAX, positions follow from names and names from positions, if only one is given.
    """

    def __init__(self, f: Callable[..., Any], options: Mapping[str, Any]):
        given = options.get("static_argnums"), options.get("static_argnames")
        positions = set(numbers(() if given[0] is None else given[0], "jit", "static_argnums"))
        names = {given[1]} if isinstance(given[1], str) else set(given[1] or ())
        try:
            parameters = list(inspect.signature(f).parameters.values())
        except (TypeError, ValueError):  # no signature
            parameters = []
        plain = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        ordered = [p.name for p in parameters if p.kind in plain]
        self._positions = {i % len(ordered) if i < 0 and ordered else i for i in positions}
        if given[1] is None:
            names = {ordered[i] for i in self._positions if i < len(ordered)}
        if given[0] is None:
            self._positions = {i for i, name in enumerate(ordered) if name in names}
        self._names = names

    def types(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        """A key that calls share if JAX traces the same program for them.

        It has the values of static arguments, and for all others the tree and types.
        """
        dynamic = (
            [x for i, x in enumerate(args) if i not in self._positions],
            {k: x for k, x in kwargs.items() if k not in self._names},
        )
        static = (
            tuple(x for i, x in enumerate(args) if i in self._positions),
            tuple(sorted((k, x) for k, x in kwargs.items() if k in self._names)),
        )
        leaves, tree = jax.tree.flatten(dynamic)
        return static, tree, tuple(map(jax.typeof, leaves))


def shardings(leaves: Iterable[Any]) -> list[Any]:
    """The sharding of each array; None for other values."""
    return [getattr(x, "sharding", None) for x in leaves]
