"""How one equation runs in slices: along which axis each operand and each result is sliced.

A *slice* of a value along an axis is one of `n` equal parts of contiguous indices. An equation can
run in slices if slice `i` of its results needs only slice `i` of some operands, and other operands
in full. Or its result is a sum over the axis: then the sum of the results over all slices is the
result. For example, `x @ w` runs in slices along the rows of `x`: the rows of the result are
sliced, and `w` is read in full. Along the contracted axis, both operands are sliced and the result
is a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xform._jax import JaxprEqn
from xform.program.dimensions import shape
from xform.registry.ends import Ends
from xform.registry.repeatable import repeatable
from xform.registry.table import ends, keeps_order, returns_operands, traits
from xform.slices.draws import draws_each_element
from xform.slices.shards import has_known_shards, mesh_axes, shard_length

# The axis of a value that is sliced; None if the value is not sliced.
SlicedAxis = int | None


class Slicing(NamedTuple):
    """How an equation runs in slices.

    Attributes:
      operands: for each operand the axis along which it is sliced; None if it is read in full.
      results: for each result the axis along which it is sliced. None if it is a sum over the
        slices (`summed`), or else the same in each slice.
      summed: whether the results without an axis are sums over the slices.
    """

    operands: tuple[SlicedAxis, ...]
    results: tuple[SlicedAxis, ...]
    summed: bool = False


def may_be_sliced(eqn: JaxprEqn, has_body: bool = False) -> bool:
    """Return whether a sliced region may contain an equation of this kind.

    It may not if the equation must not run twice or communicates, or if the compiler cannot analyze
    it. Of equations with random numbers, only some draws may be sliced. Values within a `shard_map`
    are not sliced, and neither are random keys. An equation that has a body may read such values in
    full, because each equation of the body is checked.
    """
    if draws_each_element(eqn):
        return True
    known = traits(eqn.primitive)
    unsafe = known.random or known.collective or known.foreign or not repeatable(eqn)
    values = eqn.outvars if has_body else (*eqn.invars, *eqn.outvars)
    return not unsafe and not any(map(_is_unsliceable, values))


def _is_unsliceable(v: Any) -> bool:
    """Return whether a value has unknown shards, or a type without numbers."""
    dtype = getattr(v.aval, "dtype", None)
    no_numbers = dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended)
    return no_numbers or not has_known_shards(v.aval)


def of_operand(eqn: JaxprEqn, k: int, axis: int) -> Slicing | None:
    """Return how an equation runs in slices along an axis of operand `k`; None if it cannot.

    The equation runs no other program. `nested.py` handles calls, loops and branches.
    """
    if keeps_order(eqn):
        return _reshape(eqn, shape(eqn.invars[0]), axis, of_result=False)
    if returns_operands(eqn):
        return _identity(eqn, shape(eqn.invars[k]), axis)
    table = ends(eqn)
    end = table[k][axis]
    if end is None:
        return None
    if end < len(shape(eqn.outvars[0])):
        return _kept(eqn, table, end)
    operands = [_axis_with_end(v, row, end) for v, row in zip(eqn.invars, table, strict=True)]
    return Slicing(tuple(operands), (None,) * len(eqn.outvars), summed=True)


def of_result(eqn: JaxprEqn, r: int, axis: int) -> Slicing | None:
    """Return how an equation runs in slices along an axis of result `r`; None if it cannot."""
    if keeps_order(eqn):
        return _reshape(eqn, shape(eqn.outvars[0]), axis, of_result=True)
    if returns_operands(eqn):
        return _identity(eqn, shape(eqn.outvars[r]), axis)
    return _kept(eqn, ends(eqn), axis)


def _kept(eqn: JaxprEqn, table: Sequence[Ends], axis: int) -> Slicing | None:
    """Return the slicing along `axis` of the results, which each slice computes on its own."""
    sizes = {shape(v)[axis] if axis < len(shape(v)) else None for v in eqn.outvars}
    if len(sizes) > 1 or None in sizes:
        return None
    (size,) = sizes
    operands: list[SlicedAxis] = []
    for v, row in zip(eqn.invars, table, strict=True):
        operand_axis = _axis_with_end(v, row, axis)
        if operand_axis is not None and shape(v)[operand_axis] != size:
            if shape(v)[operand_axis] != 1:
                return None
            operand_axis = None  # an axis of length 1 is repeated
        operands.append(operand_axis)
    known = traits(eqn.primitive)
    # All indices of an axis that no operand has are alike, or differ by a known offset.
    made = (known.result_shape and not known.reshapes) or draws_each_element(eqn)
    if not made and all(i is None for i in operands):
        return None
    return Slicing(tuple(operands), (axis,) * len(eqn.outvars))


def _axis_with_end(v: object, row: Ends, end: int) -> SlicedAxis:
    """Return the axis of an operand that ends in `end`; None if no axis does."""
    return row.index(end) if end in row else None


def _identity(eqn: JaxprEqn, sizes: Sequence[int], axis: int) -> Slicing | None:
    """Return the slicing of a barrier: every operand is sliced along the same axis, or none."""
    size = sizes[axis]
    has_axis = lambda v: axis < len(shape(v)) and shape(v)[axis] == size
    operands = tuple(axis if has_axis(v) else None for v in eqn.invars)
    if not all(map(has_axis, eqn.outvars)):
        return None
    return Slicing(operands, (axis,) * len(eqn.outvars))


def _reshape(eqn: JaxprEqn, sizes: Sequence[int], axis: int, of_result: bool) -> Slicing | None:
    """Return the slicing of a reshape along `axis`, of its result if `of_result`, else its operand.

    The axis stays if the other shape has an axis with the same number of elements before it.
    Slices along both axes are then the same elements, if `n` divides the lengths of both.
    """
    if sizes[axis] < 2:
        return None
    others = shape(eqn.invars[0] if of_result else eqn.outvars[0])
    before, at = math.prod(sizes[:axis]), 1
    for i, size in enumerate(others):
        if at == before and size > 1:
            return Slicing((i,), (axis,)) if of_result else Slicing((axis,), (i,))
        at *= size
    return None


def divides(n: int, eqn: JaxprEqn, slicing: Slicing) -> bool:
    """Return whether `n` slices of an equation's values are slices of equal shards.

    `n` divides the length of each sliced axis within a shard. All sliced axes are sharded alike,
    and their indices are not numbers of an iota: these would differ between shards.
    """
    pairs = zip((*eqn.invars, *eqn.outvars), (*slicing.operands, *slicing.results), strict=True)
    found = [(v, axis) for v, axis in pairs if axis is not None]
    sharded = {mesh_axes(v.aval, axis) for v, axis in found}
    counts = traits(eqn.primitive).counts
    numbers = bool(counts) and slicing.results[0] == eqn.params[counts]
    if len(sharded) > 1 or (numbers and any(sharded)):
        return False
    return not any(shard_length(v, axis) % n for v, axis in found)


def first_axis(sizes: Sequence[int], axis: int) -> bool:
    """Return whether slices of a value along an axis are contiguous in memory."""
    return math.prod(sizes[:axis]) == 1
