"""How XLA runs matrix products (`dot_general`) and convolutions.

XLA can read an operand only in some axis orders. If the operand lies in memory in another order,
XLA copies it. These functions answer questions about one equation: its sizes as a product of
matrices, and the axis order in which each operand is read.
Source: XLA's `dot_decomposer.cc`, and `conv_canonicalization.cc` for convolutions on a CPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from xform._jax import JaxprEqn, dot_general_p
from xform.program.dimensions import numbers

_16_BIT_FLOATS = frozenset(map(jnp.dtype, ("bfloat16", "float16")))


def shape(aval: object) -> tuple[int, ...]:
    """Return the shape of a type, as numbers; () for a type without a shape, such as a token."""
    return numbers(getattr(aval, "shape", ()))


def is_16_bit(aval: object) -> bool:
    """Return whether a type has elements of 16-bit floats."""
    return getattr(aval, "dtype", None) in _16_BIT_FLOATS


def as_matrices(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the sizes of a product, rewritten as a product of matrices.

    These are the sizes of the batch axes, the rows of the left operand, the summed elements, and
    the columns of the right operand. Returns () if the product needs no rewriting.
    """
    (summed, _), batch = eqn.params["dimension_numbers"]
    a, b = (shape(v.aval) for v in eqn.invars)
    n_free = [len(x) - len(summed) - len(batch[0]) for x in (a, b)]
    if len(summed) == 1 and (n_free == [1, 1] or (not batch[0] and max(n_free) <= 1)):
        return ()
    batch_sizes = tuple(a[i] for i in batch[0])
    n_summed, n_products = math.prod(a[i] for i in summed), math.prod(batch_sizes)
    rows, columns = (math.prod(x) // max(1, n_summed * n_products) for x in (a, b))
    return (*batch_sizes, rows, n_summed, columns)


def batch_and_summed(eqn: JaxprEqn) -> tuple[int, int]:
    """Return the number of matrix products in a batched product, and of summed elements in each."""
    (summed, _), (batch, _) = eqn.params["dimension_numbers"]
    size = shape(eqn.invars[0].aval)
    return math.prod(size[i] for i in batch), math.prod(size[i] for i in summed)


def is_outer(eqn: JaxprEqn) -> bool:
    """Return whether a product sums nothing: then it is an elementwise product of broadcasts.

    It sums nothing if it has no summed axes, or only axes of length one.
    """
    (summed, _), _ = eqn.params["dimension_numbers"]
    return all(shape(eqn.invars[0].aval)[a] == 1 for a in summed)


def operand_orders(eqn: JaxprEqn, i: int, axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the axis orders in which XLA can read operand `i`, the preferred order first.

    `axes` has one entry for each axis of the operand: the number of that axis in memory. The
    returned orders use the numbers in memory.

    A product reads the batch axes first. Then it reads the free and the summed axes of the left
    operand, or the summed and the free axes of the right operand. (Free axes are neither batch axes
    nor summed.) If there is at most one free and one summed axis, these two may be swapped.
    A convolution reads the channels last.
    """
    if eqn.primitive is dot_general_p:
        summed, batch = (tuple(axes[a] for a in operand_axes[i])
                         for operand_axes in eqn.params["dimension_numbers"])  # fmt: skip
        free = tuple(a for a in axes if a not in summed and a not in batch)
        orders = [(*batch, *free, *summed), (*batch, *summed, *free)]
        orders = orders if i == 0 else orders[::-1]
        return orders if len(free) <= 1 and len(summed) <= 1 else orders[:1]
    numbers = eqn.params["dimension_numbers"]
    # The batch and the feature axis of the input, or the output and the input axis of the kernel.
    a, b, *spatial = (axes[k] for k in (numbers.lhs_spec, numbers.rhs_spec)[i])
    return [(a, *spatial, b) if i == 0 else (*spatial, b, a)]


class OperandLayout(NamedTuple):
    """How a product or a convolution reads an operand that may be a transposed value.

    Attributes:
      reads_operand: it reads the operand itself. Otherwise it reads the value from which the
        operand was transposed, or a copy.
      preferred: it reads the axes in the preferred order of `operand_orders`.
      copy_order: the axes of the original value in the order of the copy; () without a copy.
      copy_shape: the shape of the copy.
    """

    reads_operand: bool
    preferred: bool
    copy_order: tuple[int, ...] = ()
    copy_shape: tuple[int, ...] = ()


def operand_layout(eqn: JaxprEqn, i: int, axes: tuple[int, ...] | None) -> OperandLayout:
    """Return how a product or a convolution reads operand `i`.

    If the operand is a transposed value, `axes` is the permutation that was applied: for each axis
    of the operand, the axis of the original value. Otherwise it is None.
    """
    size = shape(eqn.invars[i].aval)
    identity = tuple(range(len(size)))
    permutation = axes or identity
    original_shape = tuple(size[permutation.index(a)] for a in identity)
    candidates = ((permutation, not axes, original_shape), (identity, True, size))
    for axes_in_memory, reads_operand, memory_shape in candidates:
        # An axis of length one fits into any order, so it is left out.
        orders = [
            tuple(a for a in order if memory_shape[a] != 1)
            for order in operand_orders(eqn, i, axes_in_memory)
        ]
        if (order_in_memory := tuple(sorted(orders[0]))) in orders:
            return OperandLayout(reads_operand, order_in_memory == orders[0])
    order = operand_orders(eqn, i, permutation)[0]
    return OperandLayout(False, True, order, tuple(original_shape[a] for a in order))


def channels_last(eqn: JaxprEqn) -> tuple[int, ...]:
    """Return the axes of a convolution's result in the order that XLA writes.

    That is: the batch axis, the spatial axes, and the features last.
    """
    batch, feature, *spatial = eqn.params["dimension_numbers"].out_spec
    return (batch, *spatial, feature)
