"""How a compiler runs products and convolutions: which operands it copies into another order.

Source: XLA's `dot_decomposer.cc`; `conv_canonicalization.cc` for convolutions on a CPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from xform._jax import JaxprEqn, dot_general_p

_NARROW = frozenset(map(jnp.dtype, ("bfloat16", "float16")))


def shape(aval: object) -> tuple[int, ...]:
    """The shape of a value; that of a token is none."""
    return getattr(aval, "shape", ())


def narrow(aval: object) -> bool:
    """Whether a value is of floating-point numbers of 16 bits."""
    return getattr(aval, "dtype", None) in _NARROW


def as_matrices(eqn: JaxprEqn) -> tuple[int, ...]:
    """The sizes of a product as one of matrices: batch axes, left rows, what is summed, columns.

    None of them if it is one already.
    """
    (summed, _), batch = eqn.params["dimension_numbers"]
    a, b = (shape(v.aval) for v in eqn.invars)
    free = [len(x) - len(summed) - len(batch[0]) for x in (a, b)]
    if len(summed) == 1 and (free == [1, 1] or (not batch[0] and max(free) <= 1)):
        return ()
    sizes = tuple(a[i] for i in batch[0])
    inner, outer = math.prod(a[i] for i in summed), math.prod(sizes)
    rows, columns = (math.prod(x) // max(1, inner * outer) for x in (a, b))
    return (*sizes, rows, inner, columns)


def batch_and_summed(eqn: JaxprEqn) -> tuple[int, int]:
    """How many products of matrices a product is, and how many numbers each element sums."""
    (summed, _), (batch, _) = eqn.params["dimension_numbers"]
    size = shape(eqn.invars[0].aval)
    return math.prod(size[i] for i in batch), math.prod(size[i] for i in summed)


def outer(eqn: JaxprEqn) -> bool:
    """Whether a product sums nothing: then it is one of elements."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return all(shape(eqn.invars[0].aval)[a] == 1 for a in contracted)


def orders(eqn: JaxprEqn, i: int, axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The orders of axes in which an operand of a product or a convolution is read, best first.

    `axes` are, of each axis of the operand, the axis of the value as it lies in memory. A product
    is run with batch axes first, then, on the left, the free and the contracted axes, on the right,
    the contracted and the free ones; either way where there is one of each. A convolution is run
    with channels last.
    """
    if eqn.primitive is dot_general_p:
        contracted, batch = (tuple(axes[a] for a in ends[i])
                             for ends in eqn.params["dimension_numbers"])  # fmt: skip
        free = tuple(a for a in axes if a not in contracted and a not in batch)
        ways = [(*batch, *free, *contracted), (*batch, *contracted, *free)]
        ways = ways if i == 0 else ways[::-1]
        return ways if len(free) <= 1 and len(contracted) <= 1 else ways[:1]
    numbers = eqn.params["dimension_numbers"]
    a, b, *spatial = (axes[k] for k in (numbers.lhs_spec, numbers.rhs_spec)[i])
    return [(a, *spatial, b) if i == 0 else (*spatial, b, a)]


class Reading(NamedTuple):
    """How a product or a convolution reads an operand: as it was given, or as it lies in memory.

    `first`: in the first of the orders that serve. If it is copied: into which `order` of axes, and
    their `sizes`.
    """

    as_given: bool
    first: bool
    order: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def reading(eqn: JaxprEqn, i: int, axes: tuple[int, ...] | None) -> Reading:
    """How an operand is read whose axes lie in some order in memory (None: as they are given)."""
    size = shape(eqn.invars[i].aval)
    straight = tuple(range(len(size)))
    lies = axes or straight
    sizes = tuple(size[lies.index(a)] for a in straight)
    for way, as_given, now in ((lies, not axes, sizes), (straight, True, size)):
        real = [tuple(a for a in order if now[a] != 1) for order in orders(eqn, i, way)]
        if (ordered := tuple(sorted(real[0]))) in real:
            return Reading(as_given, ordered == real[0])
    order = orders(eqn, i, lies)[0]
    return Reading(False, True, order, tuple(sizes[a] for a in order))


def channels_last(eqn: JaxprEqn) -> tuple[int, ...]:
    """The order in which a convolution writes the axes of its result."""
    a, b, *spatial = eqn.params["dimension_numbers"].out_spec
    return (a, *spatial, b)
