"""Propose regions of a program, and numbers of slices for each.

A region is worth slicing if it computes large values that exist only within it. So the search looks
around the largest values of the program, along each of their axes. The regions whose inner values
take the most bytes come first. If two take the same, the one without sums comes first, because it
changes no rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from xform._jax import Var
from xform._jax.symbolic import is_symbolic
from xform.interpret.cost import aval_bytes
from xform.program.dimensions import shape
from xform.program.ir import Program
from xform.slices.custom_rules import largest_inside
from xform.slices.region import Region, find_region
from xform.slices.shards import shard_length
from xform.slices.slicing import first_axis

Made = TypeVar("Made")
# How many of the largest values are looked at, and how many slices a region has at most.
_LARGEST = 12
MAX_SLICES = 1024


class RegionChoice(NamedTuple):
    """A region, with several numbers of slices: the same equations, in rising number."""

    regions: tuple[Region, ...]

    @property
    def fewest(self) -> Region:
        """The region with the fewest slices."""
        return self.regions[0]

    @property
    def _rank(self) -> tuple[float, ...]:
        region = self.fewest
        sums = sum(slicing.summed for _, slicing, _ in region.outputs)
        copies = sum(not first_axis(shape(v), axis) for v, axis in region.sliced)
        return (-region.inside_bytes, sums, copies)


def fewest_slices(
    choice: RegionChoice, most: Made, make: Callable[[Region], Made], fits: Callable[[Made], bool]
) -> Made:
    """Return what is made of the region with the fewest slices that fits, by bisection.

    Args:
      choice: the region, with several numbers of slices.
      most: what `make` returns for the most slices; it fits.
      make: makes a program or a plan of the region with some number of slices.
      fits: whether such a program or plan fits.
    """
    low, high, best = 0, len(choice.regions) - 1, most
    while low < high:
        middle = (low + high) // 2
        made = make(choice.regions[middle])
        if fits(made):
            high, best = middle, made
        else:
            low = middle + 1
    return best


def choices(prog: Program) -> list[RegionChoice]:
    """Return regions of a program that may be sliced, the most promising first.

    `prog` is a program whose calls are opened.
    """
    found: list[RegionChoice] = []
    inside: set[tuple[Var, int]] = set()
    for v in _largest_values(prog):
        for axis in range(len(shape(v))):
            if (v, axis) in inside or is_symbolic(shape(v)[axis]):
                continue
            for choice in _along(prog, v, axis, shard_length(v, axis)):
                inside.update(choice.fewest.axes.items())
                found.append(choice)
    return sorted(found, key=lambda choice: choice._rank)  # pyright: ignore[reportPrivateUsage]


def _largest_values(prog: Program) -> list[Var]:
    """Return the largest values that equations make.

    An operand or result of a function with a custom rule counts like the largest value inside it.
    """
    sizes: dict[Var, int] = {}
    for eqn in prog.equations:
        inside = largest_inside(eqn)
        for v in (*(eqn.invars if inside else ()), *eqn.outvars):
            if isinstance(v, Var) and aval_bytes(v.aval):
                sizes[v] = max(sizes.get(v, aval_bytes(v.aval)), inside)
    return sorted(sizes, key=lambda v: -sizes[v])[:_LARGEST]


def _along(prog: Program, v: Var, axis: int, size: int) -> Iterator[RegionChoice]:
    """Yield the regions around a value along one axis. With more slices, a region may be smaller.

    `size` is the length of the axis within a shard. A region whose inner values are small is left
    out.
    """
    regions: list[Region | None] = []
    for n in numbers_of_slices(size):
        fewer = next((r for r in reversed(regions) if r is not None and n % r.n == 0), None)
        regions.append((fewer and fewer.resliced(n)) or find_region(prog, v, axis, n))
    group: list[Region] = []
    for region in (*filter(None, regions), None):
        if group and (region is None or region.members.keys() != group[0].members.keys()):
            if 2 * group[0].inside_bytes >= aval_bytes(v.aval):
                yield RegionChoice(tuple(group))
            group = []
        if region is not None:
            group.append(region)


def numbers_of_slices(size: int) -> list[int]:
    """Return numbers of slices for an axis: the divisors of its length nearest to powers of two.

    >>> from xform.slices.candidates import numbers_of_slices
    >>> numbers_of_slices(96), numbers_of_slices(15), numbers_of_slices(7)
    ([2, 4, 8, 16, 32, 48, 96], [3, 5, 15], [7])
    """
    small = [d for d in range(2, math.isqrt(size) + 1) if size % d == 0]
    divisors = sorted({*small, *(size // d for d in small), size} - {1})
    divisors = [d for d in divisors if d <= MAX_SLICES]
    powers = [2**k for k in range(1, MAX_SLICES.bit_length())]
    nearest = {min(divisors, key=lambda d: abs(math.log2(d / p))) for p in powers if divisors}
    return sorted(nearest)
