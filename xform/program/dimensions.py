"""Dimensions as numbers, also those that are symbols while `jax.export` traces a function.

A *symbolic dimension* is an expression of sizes that have only a name, such as `2*b + 1`. The
derivative of a program with such dimensions is exact for all sizes. But to choose what it saves, a
planner compares bytes and FLOPs. It counts them at a *sample*: one size for each symbol. In the
default sample each symbol is 128, or near 128 if it has constraints, such as `b <= 64`. A budget
names another sample, which `at_sample` sets.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from xform._jax.symbolic import (
    Constraint,
    bounds_of,
    constraints_of,
    is_at_least,
    is_symbolic,
    symbols_of,
    value_of,
)
from xform.storage.bounded_cache import BoundedCache

# A size for each symbol, in the order of their names; empty for the default sample.
Sample = tuple[tuple[str, int], ...]

# The size of a symbol in the default sample, if no constraint excludes it.
_USUAL = 128
# The sizes that are tried for all symbols together if they have constraints.
_POWERS = (_USUAL, 64, 32, 16, 8, 4, 2, 1, 256, 512, 1024)
# How many sizes of one symbol, and how many combinations, are tried to satisfy the constraints.
_MOST_SIZES, _MOST_COMBINATIONS = 1_024, 20_000
_SAMPLE = contextvars.ContextVar[Sample]("xform_sample", default=())
# The default sizes of the symbols that have constraints, by scope.
_CONSTRAINED: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def number(dimension: Any) -> int:
    """Return a dimension as a number: a symbolic dimension has its value at the current sample.

    >>> from xform.program.dimensions import at_sample, number
    >>> (b,) = jax.export.symbolic_shape("b")
    >>> number(3), number(2 * b + 1)
    (3, 257)
    >>> with at_sample((("b", 5),)):
    ...     number(2 * b + 1)
    11
    """
    return max(0, value_of(dimension, _sizes(dimension))) if is_symbolic(dimension) else dimension


def shape(v: Any) -> tuple[int, ...]:
    """Return the shape of a variable's type; `(0,)` (no elements) for a type without a shape."""
    return getattr(v.aval, "shape", (0,))


def numbers(dimensions: Iterable[Any]) -> tuple[int, ...]:
    """Return dimensions, such as those of a shape, as numbers."""
    return tuple([n if type(n) is int else number(n) for n in dimensions])


def as_data(dimensions: Iterable[Any]) -> tuple[int | str, ...]:
    """Return dimensions as plain data: a number, or the text of a symbolic dimension.

    >>> from xform.program.dimensions import as_data
    >>> as_data(jax.export.symbolic_shape("2*b, 4"))
    ('2*b', 4)
    """
    return tuple([str(n) if is_symbolic(n) else int(n) for n in dimensions])


def product(dimensions: Iterable[Any]) -> int:
    """Return the product of dimensions as a number: for a shape, the number of elements."""
    n = math.prod(dimensions)
    return n if type(n) is int else number(n)


def has_elements(shape: Iterable[Any]) -> bool:
    """Return whether an array of this shape has elements, whatever the sizes of symbols are."""
    return all(is_at_least(n, 1) for n in shape)


def symbolic_dimensions(avals: Iterable[Any]) -> list[Any]:
    """Return the symbolic dimensions in the shapes of some types."""
    return [n for a in avals for n in getattr(a, "shape", ()) if is_symbolic(n)]


def sample_of(dimensions: Iterable[Any]) -> Sample:
    """Return the size of each symbol in some symbolic dimensions, at the current sample."""
    return tuple(sorted({(name, _sizes(n)[name]) for n in dimensions for name in symbols_of(n)}))


def violated_constraint(sizes: Mapping[str, int], dimensions: Iterable[Any]) -> str:
    """Return a constraint on some symbolic dimensions that sizes of symbols violate; else ""."""
    scopes = {n.scope for n in dimensions}
    constraints = (c for scope in scopes for c in constraints_of(scope))
    decided = (c for c in constraints if sizes.keys() >= c.symbols)
    return next((c.text for c in decided if not c.holds(sizes)), "")


def sample_text(sample: Sample) -> str:
    """Return the sizes of a sample as text, such as "b = 64, s = 128"."""
    return ", ".join(f"{name} = {size}" for name, size in sample)


def current_sample() -> Sample:
    """Return the sample that `at_sample` has set."""
    return _SAMPLE.get()


@contextlib.contextmanager
def at_sample(sample: Sample) -> Generator[None]:
    """Return a context in which symbols have the sizes of a sample; others the default sizes."""
    token = _SAMPLE.set(sample)
    try:
        yield
    finally:
        _SAMPLE.reset(token)


class SampledCache(BoundedCache[Any, Any]):
    """A bounded cache with separate entries for each sample.

    >>> from xform.program.dimensions import SampledCache, at_sample
    >>> cache = SampledCache()
    >>> cache["bytes"] = 512
    >>> with at_sample((("b", 5),)):
    ...     "bytes" in cache
    False
    """

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(_key(key))

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_key(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_key(key), value)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key; `default` if it has none."""
        return super().get(_key(key), default)


def _key(key: Any) -> Any:
    """Return the key of an entry for the current sample."""
    sample = _SAMPLE.get()
    return (sample, key) if sample else key


def _sizes(dimension: Any) -> dict[str, int]:
    """Return the size of each symbol in a symbolic dimension, and perhaps of others."""
    usual = dict.fromkeys(symbols_of(dimension), _USUAL)
    return usual | _constrained_sizes(dimension.scope) | dict(_SAMPLE.get())


def _constrained_sizes(scope: Any) -> dict[str, int]:
    """Return the default sizes of the symbols in the constraints of a scope."""
    if scope not in _CONSTRAINED:
        _CONSTRAINED[scope] = _satisfying_sizes(constraints_of(scope), scope)
    return _CONSTRAINED[scope]


def _satisfying_sizes(constraints: Sequence[Constraint], scope: Any) -> dict[str, int]:
    """Return sizes near 128 that satisfy all constraints, if a short search finds such sizes.

    If all constraints are bounds, the search first tries sizes that are as equal as these allow.
    """
    names = sorted({name for c in constraints for name in c.symbols})
    bounds = {name: bounds_of(name, scope) for name in names}
    nearest = lambda n: {name: min(max(low, n), high) for name, (low, high) in bounds.items()}
    for equal in map(nearest, _POWERS):
        if all(c.holds(equal) and not c.is_equality for c in constraints):
            return equal
    ranges = {name: _candidates(*pair) for name, pair in bounds.items()}
    found = _search({}, names, ranges, constraints, iter(range(_MOST_COMBINATIONS)))
    return nearest(_USUAL) if found is None else found


def _candidates(lower: int, upper: int) -> list[int]:
    """Return sizes to try for a symbol with two bounds, the best first.

    First comes the size nearest to 128, then powers of two, then the sizes around the first one.
    """
    middle = min(max(lower, _USUAL), upper)
    around = range(max(lower, middle - _MOST_SIZES), min(upper, middle + _MOST_SIZES) + 1)
    return sorted(around, key=lambda n: (n != middle, n & (n - 1) > 0, abs(n - middle)))


def _search(sizes: dict[str, int], names: Sequence[str], ranges: Mapping[str, Sequence[int]],
            constraints: Sequence[Constraint], tries: Iterator[int]
            ) -> dict[str, int] | None:  # fmt: skip
    """Return `sizes` with a size for each of `names`, such that all constraints hold; else None.

    `ranges` has the sizes of each symbol to try. The search ends when `tries` ends.
    """
    if not names:
        return sizes
    name, *rest = names
    for size in ranges[name]:
        if next(tries, None) is None:
            return None
        more = {**sizes, name: size}
        decided = (c for c in constraints if name in c.symbols and more.keys() >= c.symbols)
        if all(c.holds(more) for c in decided):
            found = _search(more, rest, ranges, constraints, tries)
            if found is not None:
                return found
    return None
