"""How a primitive maps the axes of its operands to axes of its result.

An axis of an operand ends in one of three ways:

- it *stays*: it becomes an axis of the result with the same indices;
- it is *summed*: the primitive sums over it;
- it is *mixed*: elements of the result depend on several of its indices, or on their order.

In `x @ w` the rows of `x` stay and its columns are summed. In `cumsum(x, 0)` axis 0 is mixed. The
rule of a primitive states it (`Traits.ends`), or it follows from the dependence. The functions here
are statements that several primitives share. `xform.registry.table.ends` returns what holds for an
equation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xform._jax import JaxprEqn
from xform.program.dimensions import shape

# One entry for each axis of an operand:
# - the axis of the result, if the operand's axis stays;
# - a number greater than every axis of the result, if it is summed. Axes that are summed together
#   have the same number, such as the two contracted axes of a matrix product;
# - None, if it is mixed.
Ends = tuple[int | None, ...]
# Returns the `Ends` of each operand of an equation.
EndsRule = Callable[[JaxprEqn], list[Ends]]


def remaining_axes(ndim: int, *taken: Sequence[int]) -> list[int]:
    """Return the axes of an array with `ndim` axes that are in none of the lists `taken`."""
    return [i for i in range(ndim) if not any(i in axes for axes in taken)]


def all_stay(eqn: JaxprEqn) -> list[Ends]:
    """All axes stay. All axes of an operand with another rank than the result are mixed."""
    ndim = len(shape(eqn.outvars[0]))
    return [tuple(range(ndim)) if len(s) == ndim else (None,) * len(s)
            for s in map(shape, eqn.invars)]  # fmt: skip


def all_mixed(eqn: JaxprEqn) -> list[Ends]:
    """All axes are mixed."""
    return [(None,) * len(shape(v)) for v in eqn.invars]


def same_lengths_stay(eqn: JaxprEqn) -> list[Ends]:
    """An axis stays if it has the same length in the result: the part is then the whole axis."""
    ys = shape(eqn.outvars[0])
    return [tuple(i if len(s) == len(ys) and s[i] == ys[i] else None for i in range(len(s)))
            for s in map(shape, eqn.invars)]  # fmt: skip


def reduced(eqn: JaxprEqn) -> list[Ends]:
    """The axes of a reduction that is not a sum are mixed, and all other axes stay in order."""
    return _reduction(eqn, summed=False)


def summed(eqn: JaxprEqn) -> list[Ends]:
    """The axes of a sum are summed, and all other axes stay in order."""
    return _reduction(eqn, summed=True)


def _reduction(eqn: JaxprEqn, summed: bool) -> list[Ends]:
    axes, out = eqn.params["axes"], list[Ends]()
    for s in map(shape, eqn.invars):
        kept = remaining_axes(len(s), axes)
        result_axis = {axis: j for j, axis in enumerate(kept)}
        over = {axis: len(kept) + k if summed else None for k, axis in enumerate(axes)}
        out.append(tuple(result_axis.get(i, over.get(i)) for i in range(len(s))))
    return out


def mixes(name: str) -> EndsRule:
    """Return the statement that the axes in a parameter are mixed, and all other axes stay.

    The parameter is an axis or a sequence of axes. An axis may count from the end.
    """

    def rule(eqn: JaxprEqn) -> list[Ends]:
        axes = eqn.params[name]
        mixed = set[int](axes if isinstance(axes, Sequence) else [axes])
        ndims = [len(shape(v)) for v in eqn.invars]
        return [tuple(None if mixed & {i, i - n} else i for i in range(n)) for n in ndims]

    return rule


def matrices(eqn: JaxprEqn) -> list[Ends]:
    """All axes stay except the last two of matrices, and the last of vectors that go with them."""
    ndims = [len(shape(v)) for v in eqn.invars]
    batch = max(ndims) - 2
    return [tuple(i if i < batch else None for i in range(n)) for n in ndims]
