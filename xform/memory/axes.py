"""Which axes of a program's values run over the same indices.

An axis is a product of factors, slowest-varying first. A reshape that merges two axes makes an axis
of two factors. A reshape that splits an axis replaces its factor by two. Axes that run over the
same indices have the same factors. An axis of length 1 has no factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Factors = tuple[int, ...]


class Axes:
    """The factors of the axes of a program, found by unification while its equations are read.

    Cost: memory for a few numbers for each axis, whatever the size of the values.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        # Factors that turned out to equal another factor, or a product of several.
        self._means: dict[int, Factors] = {}
        self._mixed: list[int] = []

    def new(self, size: int) -> Factors:
        """Make an axis that shares no factor with any other so far."""
        if size < 2:
            return ()
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def size(self, factor: int) -> int:
        """The length of a factor."""
        return self._sizes[factor]

    def factors(self, axis: Iterable[int]) -> Factors:
        """The factors of an axis, as far as they are known now."""
        out: list[int] = []
        todo = [*axis][::-1]
        while todo:
            factor = todo.pop()
            if factor in self._means:
                self._means[factor] = means = self._shortened(self._means[factor])
                todo += means[::-1]
            else:
                out.append(factor)
        return tuple(out)

    def _shortened(self, means: Factors) -> Factors:
        """Path compression: skip one step if the factor only stands for another one."""
        return self._means.get(means[0], means) if len(means) == 1 else means

    def same(self, a: Iterable[int], b: Iterable[int]) -> None:
        """Record that two axes, or two groups of axes, run over the same indices."""
        left, right = self.factors(a), self.factors(b)
        while left and right:
            (p, *_), (q, *_) = left, right
            n, m = self._sizes[p], self._sizes[q]
            if p == q:
                left, right = left[1:], right[1:]
                continue
            if n % m == 0:
                self._means[p] = (q, *self.new(n // m))
            elif m % n == 0:
                self._means[q] = (p, *self.new(m // n))
            else:
                break
            left, right = self.factors(left), self.factors(right)
        self.mix([*left, *right])

    def mix(self, axis: Iterable[int]) -> None:
        """Record that some operation mixes the indices of an axis: it needs the whole axis."""
        self._mixed.extend(axis)

    def mixed(self) -> frozenset[int]:
        """The factors of all axes whose indices some operation mixes."""
        return frozenset(self.factors(self._mixed))


def repeated_factors(axes: Sequence[Factors]) -> frozenset[int]:
    """The factors that occur twice in a value: its elements belong to pairs of indices."""
    every = [f for axis in axes for f in axis]
    return frozenset(f for f in every if every.count(f) > 1)
