"""Find which axes of a program's values run over the same indices.

An axis is a product of *factors*, slowest-varying first. Axes that run over the same indices have
the same factors. A reshape that merges two axes makes an axis of two factors. A reshape that splits
an axis replaces its factor by two. For example, if `x` has axes with the factors `p` and `q`, the
axis of `x.reshape(-1)` has the factors `(p, q)`. An axis of length 1 has no factor. A factor is
represented by a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xform._jax import JaxprEqn
from xform.registry.table import ends, keeps_order, returns_operands

Factors = tuple[int, ...]
ValueAxes = Sequence[Factors]


class Axes:
    """The factors of the axes of a program, found by unification.

    A caller makes an axis for each axis of each value. For each equation it records which axes run
    over the same indices (`same`) and which axes the equation mixes (`mix`).

    Cost: memory for a few numbers for each axis, whatever the size of the values.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []  # the length of each factor
        # If a factor was found to equal other factors, or a product of them: these other factors.
        self._equals: dict[int, Factors] = {}
        self._mixed: list[int] = []

    def new(self, size: int) -> Factors:
        """Return a new axis of length `size`, which shares no factor with any other so far."""
        if size < 2:
            return ()
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def size(self, factor: int) -> int:
        """Return the length of a factor."""
        return self._sizes[factor]

    def factors(self, axis: Iterable[int]) -> Factors:
        """Return the factors of an axis, as far as they are known now."""
        resolved: list[int] = []
        stack = [*axis][::-1]
        while stack:
            factor = stack.pop()
            if factor in self._equals:
                self._equals[factor] = equals = self._shortened(self._equals[factor])
                stack += equals[::-1]
            else:
                resolved.append(factor)
        return tuple(resolved)

    def _shortened(self, factors: Factors) -> Factors:
        """Return equal factors after one step of path compression, which keeps look-ups fast."""
        return self._equals.get(factors[0], factors) if len(factors) == 1 else factors

    def same(self, a: Iterable[int], b: Iterable[int]) -> None:
        """Record that two axes, or two products of axes, run over the same indices.

        If their lengths do not divide each other, the remaining factors count as mixed.
        """
        left, right = self.factors(a), self.factors(b)
        while left and right:
            (p, *_), (q, *_) = left, right
            n, m = self._sizes[p], self._sizes[q]
            if p == q:
                left, right = left[1:], right[1:]
                continue
            if n % m == 0:
                self._equals[p] = (q, *self.new(n // m))
            elif m % n == 0:
                self._equals[q] = (p, *self.new(m // n))
            else:
                break
            left, right = self.factors(left), self.factors(right)
        self.mix([*left, *right])

    def unify(self, eqn: JaxprEqn, operands: Sequence[ValueAxes], results: Sequence[ValueAxes]
              ) -> Factors:  # fmt: skip
        """Record how an equation maps the axes of its operands; return the factors that it sums."""
        if keeps_order(eqn):
            self.same(merged(operands[0]), merged(results[0]))
            return ()
        if returns_operands(eqn):
            for x, y in zip(operands, results, strict=False):
                for a, b in zip(x, y, strict=True):
                    self.same(a, b)
            return ()
        summed: dict[int, Factors] = {}
        for x, axis_ends in zip(operands, ends(eqn), strict=True):
            for axis, end in zip(x, axis_ends, strict=True):
                if end is None:
                    self.mix(axis)
                elif results and end >= len(results[0]):
                    self.same(summed.setdefault(end, axis), axis)
                elif axis:  # an axis of length 1 is repeated: nothing to unify
                    for y in results:
                        self.same(axis, y[end])
        return merged(summed.values())

    def mix(self, axis: Iterable[int]) -> None:
        """Record that some operation mixes the indices of an axis: it needs the whole axis."""
        self._mixed.extend(axis)

    def mixed(self) -> frozenset[int]:
        """Return the factors of all axes whose indices some operation mixes."""
        return frozenset(self.factors(self._mixed))


def merged(axes: Iterable[Factors]) -> Factors:
    """Return the axis that a reshape makes of all axes of a value."""
    return tuple(f for axis in axes for f in axis)


def repeated_factors(axes: ValueAxes) -> frozenset[int]:
    """Return the factors that occur twice in the axes of a value, as in an outer product."""
    factors = merged(axes)
    return frozenset(f for f in factors if factors.count(f) > 1)
