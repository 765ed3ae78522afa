"""Apply a linear map to all unit vectors, or to the rows of a matrix, in chunks.

A linear map is a derivative, as a function of tangents or cotangents. Its first operation may be a
product with a known matrix. For unit vectors nothing is multiplied then: the product of a matrix
and a unit vector is a row or column of the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._jax import JaxprEqn, Var
from xform.passes.inline import Inline
from xform.program.arithmetic import Value
from xform.program.arrays import converted, placed, stacked
from xform.program.ir import Program, bind, read, trace, write
from xform.registry.table import traits

# Maps the leaves of one vector to the leaves of its image: the result of the linear map.
LinearMap = Callable[[Sequence[Value]], Sequence[Value]]


def images_of_units(
    linear: LinearMap, avals: Sequence[Any], chunk: int | None = None
) -> list[Value]:
    """Apply `linear` to each unit vector; the results have a leading batch axis.

    `avals` are the types of a vector's leaves. At most `chunk` vectors are computed at once; None:
    all.
    """
    sizes = [math.prod(a.shape) for a in avals]
    n = sum(sizes)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    leaves = list(zip(avals, starts, strict=True))
    if chunk is not None and chunk < n:
        unit = lambda i: [_unit_vector_leaf(i, aval, start) for aval, start in leaves]
        return lax.map(
            lambda i: list(linear(unit(i))), jnp.arange(n, dtype=jnp.int32), batch_size=chunk
        )
    of_rows = lambda *rows: images_of_rows(linear, rows)
    prog = Inline().program(trace(of_rows, *(stacked(n, a) for a in avals)))
    units = {
        v: _UnitVectors(n, start, aval)
        for v, (aval, start) in zip(prog.inputs, leaves, strict=True)
    }
    return _run_on_units(prog, units)


def images_of_rows(
    linear: LinearMap, rows: Sequence[Value], chunk: int | None = None
) -> list[Value]:
    """Apply `linear` to a batch of vectors on a leading axis, at most `chunk` at once."""
    as_list = lambda xs: list(linear(xs))
    if chunk is not None and chunk < rows[0].shape[0]:
        return lax.map(as_list, list(rows), batch_size=chunk)
    return jax.vmap(as_list)(list(rows))


class _UnitVectors:
    """One leaf of all unit vectors of a space, described but not computed.

    It stands for an array of shape `[n, *aval.shape]`. With all axes but the first flattened, that
    array is an identity matrix with rows of zeros above and below.

    Args:
      n: the number of unit vectors: the number of elements of all leaves.
      start: the position of the leaf's first element among these.
      aval: the type of the leaf.
    """

    def __init__(self, n: int, start: int, aval: Any):
        self.n, self.start, self.aval = n, start, aval

    def array(self) -> Value:
        """Return the unit vectors as an array."""
        return jax.vmap(lambda i: _unit_vector_leaf(i, self.aval, self.start))(
            jnp.arange(self.n, dtype=jnp.int32)
        )

    def times(self, eqn: JaxprEqn, matrix: Value, side: int) -> Value:
        """Return the result of a `dot_general` that has the unit vectors as operand `side`.

        The result holds the elements of the other operand, `matrix`, and zeros. Nothing is
        multiplied.
        """
        contract, batch = eqn.params["dimension_numbers"]
        shape = self.aval.shape
        # Axes of the leaf, without the axis of the unit vectors, and axes of the matrix.
        leaf_contract, matrix_contract = [d - 1 for d in contract[side]], contract[1 - side]
        leaf_batch, matrix_batch = [d - 1 for d in batch[side]], batch[1 - side]
        leaf_free = [d for d in range(len(shape)) if d not in (*leaf_contract, *leaf_batch)]
        matrix_free = [d for d in range(matrix.ndim) if d not in (*matrix_contract, *matrix_batch)]
        # Axes of the result for now: batch; the unit vectors, as the axes of their leaf; the free
        # axes of the leaf; the free axes of the matrix.
        b, s, a = len(leaf_batch), len(shape), len(leaf_free)
        full = (*(shape[d] for d in leaf_batch), *shape, *(shape[d] for d in leaf_free),
                *(matrix.shape[d] for d in matrix_free))  # fmt: skip
        contracted = zip(matrix_contract, leaf_contract, strict=True)
        result_axis = {**{d: b + axis for d, axis in contracted},
                       **{d: i for i, d in enumerate(matrix_batch)},
                       **{d: b + s + a + i for i, d in enumerate(matrix_free)}}  # fmt: skip
        order = sorted(range(matrix.ndim), key=result_axis.__getitem__)
        y = lax.broadcast_in_dim(lax.transpose(matrix, order), full, sorted(result_axis.values()))
        # An element of the result is zero unless, along each batch axis and each free axis of the
        # leaf, its index equals the index of the unit vector's 1 along that axis.
        axis_pairs = [*enumerate(leaf_batch), *((b + s + i, d) for i, d in enumerate(leaf_free))]
        for axis, d in axis_pairs:
            same = lax.eq(lax.broadcasted_iota(jnp.int32, full, axis),
                          lax.broadcasted_iota(jnp.int32, full, b + d))  # fmt: skip
            y = lax.select(same, y, lax.full_like(y, 0))
        size = math.prod(shape)
        y = lax.reshape(y, (*full[:b], size, *full[b + s :]))
        y = lax.pad(y, lax.full_like(y, 0, shape=()), [
            (self.start, self.n - self.start - size, 0) if axis == b else (0, 0, 0)
            for axis in range(y.ndim)
        ])  # fmt: skip
        if side:  # the free axes of the left operand come first
            matrix_axes = b + 1 + a
            y = lax.transpose(y, (*range(b), *range(matrix_axes, y.ndim), *range(b, matrix_axes)))
        out: Any = eqn.outvars[0].aval
        return placed(lax.convert_element_type(y, out.dtype), out)


def side_of_units(eqn: JaxprEqn, units: Any) -> int | None:
    """Return the position of the operand of a `dot_general` that consists of unit vectors.

    None if the equation is no `dot_general`, or if both operands or neither are unit vectors.
    `units` holds the variables of unit vectors.
    """
    if traits(eqn.primitive).product != "matrix":
        return None
    sides = [isinstance(v, Var) and v in units for v in eqn.invars]
    return None if sides.count(True) != 1 else sides.index(True)


def _run_on_units(prog: Program, units: dict[Var, _UnitVectors]) -> list[Value]:
    """Run a program on unit vectors; `units` maps each input variable to its unit vectors.

    Unit vectors become arrays only if they are an output of the program, or if an operation other
    than a product reads them.
    """
    env: dict[Any, Any] = dict(prog.consts)
    arrays: dict[Var, Value] = {}

    def value(v: Any) -> Value:
        if isinstance(v, Var) and v in units:
            if v not in arrays:
                arrays[v] = units[v].array()
            return arrays[v]
        return read(env, v)

    for eqn in prog.equations:
        side = side_of_units(eqn, units)
        if side is not None:
            operand: Any = eqn.invars[side]
            ys = [units[operand].times(eqn, value(eqn.invars[1 - side]), side)]
        else:
            ys = bind(eqn, [value(v) for v in eqn.invars])
        write(env, eqn.outvars, ys)
    return [value(v) for v in prog.outputs]


def _unit_vector_leaf(i: Value, aval: Any, start: int) -> Value:
    """Return the part of unit vector `i` in one leaf, which begins at element `start`."""
    index = lax.reshape(lax.iota(jnp.int32, math.prod(aval.shape)), aval.shape)
    return converted(lax.eq(index, lax.full_like(index, i - start)), aval)
