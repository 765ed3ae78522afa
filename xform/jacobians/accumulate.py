"""Evaluate a chain of Jacobians in a given order.

A program that is cut into segments has a chain: the Jacobian of the program is the product of the
segments' Jacobians. An order is a tree of sweeps and matrix products that computes this product. A
sweep pushes tangents (forward mode) or pulls cotangents (reverse mode) through neighbouring
segments. These vectors are all unit vectors, or the columns or rows of a matrix that another part
of the order computes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from xform._jax import Var, cotangent_aval, match_weak_type, tangent_aval
from xform.jacobians.chain import Order, Product, Sweep
from xform.jacobians.segments import CutProgram, Segment
from xform.jacobians.units import LinearMap, images_of_rows, images_of_units
from xform.jacobians.work import linear_map
from xform.program.arithmetic import Value
from xform.program.arrays import common_dtype
from xform.program.ir import environment, read

# The Jacobian by output leaf and input leaf; each block has shape `[*output, *input]`.
Blocks = list[list[Value]]
# By first and last segment of a sweep: these segments, merged, and their derivative.
_LinearMaps = dict[tuple[int, int], tuple[Segment, LinearMap]]


def accumulate(cut_program: CutProgram, order: Order, args: Sequence[Value],
               chunk: int | None = None, policy: Any = None
               ) -> tuple[list[Value], Blocks]:  # fmt: skip
    """Return the outputs of a program at `args`, and its Jacobian.

    Args:
      cut_program: the program, cut into segments.
      order: how to compute the product of the segments' Jacobians.
      args: the inputs of the program.
      chunk: the maximum number of tangents or cotangents that a sweep computes at once; None: all.
      policy: which values reverse sweeps save.
    """
    env = environment(cut_program.program, args)
    maps: _LinearMaps = {}
    for sweep in sorted(_sweeps(order), key=lambda sweep: sweep.first):
        segment = cut_program.segment(sweep.first, sweep.last)
        inputs = [env[v] for v in (*segment.active, *segment.inactive)]
        outs, derivative = linear_map(segment, sweep.mode, inputs, policy)
        computed = zip((*segment.wanted, *segment.other_outputs), outs, strict=True)
        env.update((v, y) for v, y in computed if isinstance(v, Var) and v not in env)
        maps[sweep.first, sweep.last] = segment, derivative
    full = cut_program.segment(0, len(cut_program) - 1)
    outs, ins = ([v.aval for v in variables] for variables in (full.wanted, full.active))
    if not outs or not ins:
        jacobian = _empty_blocks(outs)
    else:
        jacobian = split_into_blocks(_evaluate(order, maps, chunk), outs, ins)
    return [read(env, v) for v in cut_program.program.outputs], jacobian


def jacobian_by_sweep(mode: str, linear: LinearMap, outs: Sequence[Any], ins: Sequence[Any],
                      chunk: int | None) -> Blocks:  # fmt: skip
    """Return the Jacobian of a linear map by forward or reverse mode.

    `linear` maps tangents (forward mode) or cotangents (reverse mode). `outs` and `ins` are the
    types of the differentiated function's output leaves and input leaves.
    """
    if not outs or not ins:
        return _empty_blocks(outs)
    avals = map(tangent_aval, ins) if mode == "forward" else map(cotangent_aval, outs)
    images = images_of_units(linear, list(avals), chunk)
    return split_into_blocks(_matrices_of_images(mode, images), outs, ins)


def _empty_blocks(outs: Sequence[Any]) -> Blocks:
    """Return the Jacobian of a function without outputs or without inputs."""
    return [[] for _ in outs]


def _sweeps(order: Order | None) -> list[Sweep]:
    """Return all sweeps in an order."""
    if order is None:
        return []
    if isinstance(order, Product):
        return [*_sweeps(order.left), *_sweeps(order.right)]
    return [order, *_sweeps(order.operand)]


@dataclasses.dataclass(frozen=True)
class JacobianMatrices:
    """A Jacobian as one matrix, or as several.

    Attributes:
      split_by: "outputs": one matrix for each output leaf, with all columns; "inputs": one for each
        input leaf, with all rows; "neither": one matrix.
      matrices: the matrices.
    """

    split_by: str
    matrices: list[Value]

    def concatenated(self) -> Value:
        """Return the Jacobian as one matrix."""
        if len(self.matrices) == 1:
            return self.matrices[0]
        return lax.concatenate(_promoted(self.matrices), 0 if self.split_by == "outputs" else 1)


def _evaluate(order: Order, maps: _LinearMaps, chunk: int | None) -> JacobianMatrices:
    """Return the Jacobian of the segments that an order covers."""
    if isinstance(order, Product):
        factors = [
            _evaluate(side, maps, chunk).concatenated() for side in (order.left, order.right)
        ]
        return JacobianMatrices("neither", [lax.dot(*_promoted(factors))])
    segment, linear = maps[order.first, order.last]
    if order.mode == "forward":
        avals = [tangent_aval(v.aval) for v in segment.active]
    else:
        avals = [cotangent_aval(v.aval) for v in segment.wanted]
    if order.operand is None:
        return _matrices_of_images(order.mode, images_of_units(linear, avals, chunk))
    (aval,) = avals
    matrix = _evaluate(order.operand, maps, chunk).concatenated()
    rows = matrix.T if order.mode == "forward" else matrix
    rows = rows.astype(aval.dtype).reshape(rows.shape[0], *aval.shape)
    return _matrices_of_images(order.mode, images_of_rows(linear, [rows], chunk))


def _matrices_of_images(mode: str, images: Sequence[Value]) -> JacobianMatrices:
    """Return the Jacobian from a sweep's results (images) of all its vectors, stacked by leaf."""
    rows = [x.reshape(x.shape[0], math.prod(x.shape[1:])) for x in images]
    if mode == "forward":
        return JacobianMatrices("outputs", [x.T for x in rows])
    return JacobianMatrices("inputs", rows)


def split_into_blocks(
    jacobian: JacobianMatrices, outs: Sequence[Any], ins: Sequence[Any]
) -> Blocks:
    """Split a Jacobian into the blocks of output leaves and input leaves of these types."""
    rows, columns = ([math.prod(a.shape) for a in avals] for avals in (outs, ins))
    matrices = jacobian.matrices
    if jacobian.split_by == "outputs":
        blocks = [_split(m, columns, 1) for m in matrices]
    else:
        by_input = matrices if jacobian.split_by == "inputs" else _split(matrices[0], columns, 1)
        by_both = [_split(m, rows, 0) for m in by_input]
        blocks = [[column[i] for column in by_both] for i in range(len(outs))]
    return [
        [_reshape_block(b, y, x) for b, x in zip(row, ins, strict=True)]
        for row, y in zip(blocks, outs, strict=True)
    ]


def _reshape_block(block: Value, y: Any, x: Any) -> Value:
    """Return a block in shape `[*output, *input]` and the input's dtype, as reverse mode does."""
    return match_weak_type(block.reshape(*y.shape, *x.shape).astype(x.dtype), x)


def _split(matrix: Value, sizes: Sequence[int], axis: int) -> list[Value]:
    """Split a matrix into parts of these sizes."""
    positions = list(itertools.accumulate(sizes))[:-1]
    return jnp.split(matrix, positions, axis) if positions else [matrix]


def _promoted(arrays: Sequence[Value]) -> list[Value]:
    """Return the arrays, converted to their common dtype."""
    dtype = common_dtype(x.dtype for x in arrays)
    return [x.astype(dtype) for x in arrays]
