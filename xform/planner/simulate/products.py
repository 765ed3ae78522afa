"""How XLA runs products and convolutions: which operands it copies into another axis order.

Source: XLA's `dot_decomposer.cc`, and `conv_canonicalization.cc` for convolutions on a CPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from xform._jax import JaxprEqn, dot_general_p

_NARROW = frozenset(map(jnp.dtype, ("bfloat16", "float16")))


def shape(aval: object) -> tuple[int, ...]:
    """Return the shape of a value; () for a token."""
    return getattr(aval, "shape", ())


def is_16_bit(aval: object) -> bool:
    """Whether a value consists of 16-bit floats."""
    return getattr(aval, "dtype", None) in _NARROW


def as_matrices(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the sizes of a product written as a product of matrices.

    The sizes are those of the batch axes, then the left rows, the summed axis and the right
    columns. () if the product is one of matrices already.
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
    """Return how many matrix products a batched product has, and how many terms it sums."""
    (summed, _), (batch, _) = eqn.params["dimension_numbers"]
    size = shape(eqn.invars[0].aval)
    return math.prod(size[i] for i in batch), math.prod(size[i] for i in summed)


def is_outer(eqn: JaxprEqn) -> bool:
    """Whether all summed axes of a product have length one: then it is elementwise."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return all(shape(eqn.invars[0].aval)[a] == 1 for a in contracted)


def operand_orders(eqn: JaxprEqn, i: int, axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the axis orders that XLA can read operand `i` in, the preferred one first.

    `axes` maps each axis of the operand to the axis of the value as it lies in memory. A product
    reads the batch axes first. Then come the free and the contracted axes of the left operand, or
    the contracted and the free axes of the right operand. Both orders work if there is at most one
    axis of each kind. A convolution reads the channels last.
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


class OperandLayout(NamedTuple):
    """How a product or a convolution reads an operand.

    Attributes:
      as_given: it reads the operand itself. Otherwise it reads the original of a transposed value.
      first: it reads the axes in the preferred order.
      order: the axis order into which the operand is copied; () if it is not copied.
      sizes: the sizes of the axes of the copy.
    """

    as_given: bool
    first: bool
    order: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def operand_layout(eqn: JaxprEqn, i: int, axes: tuple[int, ...] | None) -> OperandLayout:
    """Return how an operand is read.

    `axes` is the order of its axes in memory, or None for the order of its shape.
    """
    size = shape(eqn.invars[i].aval)
    straight = tuple(range(len(size)))
    in_memory = axes or straight
    sizes = tuple(size[in_memory.index(a)] for a in straight)
    for way, as_given, now in ((in_memory, not axes, sizes), (straight, True, size)):
        real = [tuple(a for a in order if now[a] != 1) for order in operand_orders(eqn, i, way)]
        if (ordered := tuple(sorted(real[0]))) in real:
            return OperandLayout(as_given, ordered == real[0])
    order = operand_orders(eqn, i, in_memory)[0]
    return OperandLayout(False, True, order, tuple(sizes[a] for a in order))


def channels_last(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the order of the axes in the result that a convolution writes."""
    a, b, *spatial = eqn.params["dimension_numbers"].out_spec
    return (a, *spatial, b)
