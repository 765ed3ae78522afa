"""Symbolic dimensions: sizes in shapes that `jax.export` knows by name only, such as `2*b + 1`.

A dimension is a number or an expression of symbols. The symbols of one program belong to a scope,
which may have constraints, such as `b >= 8`.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax import export, lax
from jax.errors import InconclusiveDimensionOperation

from xform._jax import conv_general_dilated_p

# The type of symbolic dimensions. JAX has no public name for it.
SymbolicDimension: Any = type(export.symbolic_shape("b")[0])

# The search for bounds stops here. `bounds_of` returns this size if a symbol has no upper bound.
_LARGEST = 2**40


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A constraint on symbols: an expression is zero, or at least zero.

    Attributes:
      text: the constraint as the user wrote it.
      symbols: the names of its symbols.
      expression: the expression.
      is_equality: whether the expression must be zero; else it must not be negative.
    """

    text: str
    symbols: frozenset[str]
    expression: Any
    is_equality: bool

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether the constraint holds for these sizes of its symbols."""
        value = value_of(self.expression, sizes)
        return value == 0 if self.is_equality else value >= 0


def is_symbolic(size: Any) -> bool:
    """Return whether a dimension is an expression of symbols rather than a number."""
    return export.is_symbolic_dim(size)


def symbols_of(expression: Any) -> frozenset[str]:
    """Return the names of the symbols in an expression."""
    return frozenset(expression._get_vars())


def value_of(expression: Any, sizes: Mapping[str, int]) -> int:
    """Return the value of an expression, given the size of each of its symbols."""
    return int(expression._evaluate(dict(sizes)))


def constraints_of(scope: export.SymbolicScope) -> Sequence[Constraint]:
    """Return the constraints of a scope."""
    explicit: Any = getattr(scope, "_explicit_constraints", ())
    return [
        Constraint(c.debug_str, symbols_of(c.diff), c.diff, c.cmp.name == "EQ") for c in explicit
    ]


def smaller(a: Any, b: Any) -> Any:
    """Return the smaller of two dimensions, as an expression if it depends on their symbols."""
    if is_symbolic(a):
        return a.min(b)
    return b.rmin(a) if is_symbolic(b) else min(a, b)


def larger(a: Any, b: Any) -> Any:
    """Return the larger of two dimensions, as an expression if it depends on their symbols."""
    if is_symbolic(a):
        return a.max(b)
    return b.rmax(a) if is_symbolic(b) else max(a, b)


def conv_general_dilated(
    x: Any, w: Any, *, padding: Sequence[tuple[Any, Any]], precision: Any, **options: Any
) -> Any:
    """Return the result of `lax.conv_general_dilated`, with a padding that may be symbolic.

    The other options have the form that the primitive's parameters have.
    """
    if not any(map(is_symbolic, itertools.chain(*padding))):
        return lax.conv_general_dilated(x, w, padding=padding, precision=precision, **options)
    # `lax.conv_general_dilated` refuses a symbolic padding, so bind its primitive.
    groups = {"feature_group_count": 1, "batch_group_count": 1}
    options = {**groups, **options, "padding": tuple(map(tuple, padding)), "precision": precision}
    return conv_general_dilated_p.bind(x, w, **options)


def bounds_of(symbol: str, scope: export.SymbolicScope) -> tuple[int, int]:
    """Return the smallest and the largest size of a symbol, as far as JAX can prove bounds.

    >>> from xform._jax.symbolic import bounds_of
    >>> bounds_of("b", jax.export.SymbolicScope(["b >= 8", "2*b <= 100"]))
    (8, 50)
    """
    (size,) = export.symbolic_shape(symbol, scope=scope)
    known = range(1, _LARGEST)  # in it, each test is false up to some size, and true from there on
    lower = bisect.bisect_left(known, True, key=lambda n: not is_at_least(size, n))
    upper = bisect.bisect_left(known, True, key=lambda n: is_at_least(n, size))
    return lower, upper + 1


def is_at_least(a: Any, b: Any) -> bool:
    """Return whether `a >= b` for all sizes of the symbols, as far as JAX can prove it."""
    try:
        return bool(a >= b)
    except InconclusiveDimensionOperation:
        return False
