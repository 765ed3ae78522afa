"""Evaluate a chain of Jacobians in a given order."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from xform._jax import Var, cotangent_aval, tangent_aval, weak_as
from xform.jacobians.chain import Order, Product, Sweep
from xform.jacobians.segments import CutProgram, Segment
from xform.jacobians.units import Linear, of_rows, of_units
from xform.jacobians.work import linear
from xform.program.arithmetic import Value, common_dtype
from xform.program.ir import environment, read

# The Jacobian by output leaf and input leaf; each block has shape `[*output, *input]`.
Leaves = list[list[Value]]
# By first and last step: a segment of a chain, and its derivative as a linear map.
Maps = dict[tuple[int, int], tuple[Segment, Linear]]


def accumulate(cut_program: CutProgram, order: Order, args: Sequence[Value],
               chunk: int | None = None, policy: Any = None
               ) -> tuple[list[Value], Leaves]:  # fmt: skip
    """The outputs of a program at `args`, and its Jacobian.

    `chunk` is the maximum number of tangents (cotangents) that a sweep computes at once. `policy`
    decides what reverse sweeps save.
    """
    env = environment(cut_program.program, args)
    maps: Maps = {}
    for sweep in sorted(_sweeps(order), key=lambda s: s.first):
        segment = cut_program.segment(sweep.first, sweep.last)
        inputs = [env[v] for v in (*segment.active, *segment.inactive)]
        outs, push = linear(segment, sweep.mode, inputs, policy)
        ends = zip((*segment.wanted, *segment.others), outs, strict=True)
        env.update((v, y) for v, y in ends if isinstance(v, Var) and v not in env)
        maps[sweep.first, sweep.last] = segment, push
    full = cut_program.segment(0, len(cut_program) - 1)
    outs, ins = ([v.aval for v in ends] for ends in (full.wanted, full.active))
    jacobian = split(_parts(order, maps, chunk), outs, ins) if outs and ins else _empty(outs)
    return [read(env, v) for v in cut_program.program.outputs], jacobian


def jacobian_by_sweep(mode: str, linear: Linear, outs: Sequence[Any], ins: Sequence[Any],
                      chunk: int | None) -> Leaves:  # fmt: skip
    """The Jacobian of a linear map between values of these types, by forward or reverse mode."""
    if not outs or not ins:
        return _empty(outs)
    seeds = map(tangent_aval, ins) if mode == "forward" else map(cotangent_aval, outs)
    return split(_of_images(mode, of_units(linear, list(seeds), chunk)), outs, ins)


def _empty(outs: Sequence[Any]) -> Leaves:
    """The Jacobian without outputs or without inputs."""
    return [[] for _ in outs]


def _sweeps(order: Order | None) -> list[Sweep]:
    if order is None:
        return []
    if isinstance(order, Product):
        return [*_sweeps(order.left), *_sweeps(order.right)]
    return [order, *_sweeps(order.of)]


@dataclasses.dataclass(frozen=True)
class Parts:
    """A Jacobian as one matrix, or as several.

    Attributes:
      by: "outputs": one matrix for each output leaf, with all columns; "inputs": one for each input
        leaf, with all rows; "neither": one matrix.
      matrices: the matrices.
    """

    by: str
    matrices: list[Value]

    def matrix(self) -> Value:
        """The Jacobian as one matrix."""
        return _concatenated(self.matrices, 0 if self.by == "outputs" else 1)


def _parts(order: Order, maps: Maps, chunk: int | None) -> Parts:
    if isinstance(order, Product):
        pair = [_parts(side, maps, chunk).matrix() for side in (order.left, order.right)]
        return Parts("neither", [lax.dot(*_promoted(pair))])
    segment, push = maps[order.first, order.last]
    forward = order.mode == "forward"
    ends, kind = (segment.active, tangent_aval) if forward else (segment.wanted, cotangent_aval)
    avals = [kind(v.aval) for v in ends]
    if order.of is None:
        return _of_images(order.mode, of_units(push, avals, chunk))
    (aval,) = avals
    of = _parts(order.of, maps, chunk).matrix()
    rows = of.T if forward else of
    rows = rows.astype(aval.dtype).reshape(len(rows), *aval.shape)
    return _of_images(order.mode, of_rows(push, [rows], chunk))


def _of_images(mode: str, images: Sequence[Value]) -> Parts:
    """The Jacobian from the stacked images of all vectors that a sweep computed."""
    flat = [x.reshape(len(x), math.prod(x.shape[1:])) for x in images]
    return Parts("outputs", [x.T for x in flat]) if mode == "forward" else Parts("inputs", flat)


def split(parts: Parts, outs: Sequence[Any], ins: Sequence[Any]) -> Leaves:
    """Cut a Jacobian into the blocks of output leaves and input leaves, which have these types."""
    rows, columns = ([math.prod(a.shape) for a in avals] for avals in (outs, ins))
    if parts.by == "outputs":
        blocks = [_cut(m, columns, 1) for m in parts.matrices]
    else:
        by_input = parts.matrices if parts.by == "inputs" else _cut(parts.matrices[0], columns, 1)
        by_both = [_cut(m, rows, 0) for m in by_input]
        blocks = [[column[i] for column in by_both] for i in range(len(outs))]
    return [
        [_shaped(b, y, x) for b, x in zip(row, ins, strict=True)]
        for row, y in zip(blocks, outs, strict=True)
    ]


def _shaped(block: Value, y: Any, x: Any) -> Value:
    """A block in shape `[*output, *input]` and the dtype of the input, as reverse mode returns."""
    return weak_as(block.reshape(*y.shape, *x.shape).astype(x.dtype), x)


def _cut(matrix: Value, sizes: Sequence[int], axis: int) -> list[Value]:
    at = list(itertools.accumulate(sizes))[:-1]
    return jnp.split(matrix, at, axis) if at else [matrix]


def _concatenated(matrices: Sequence[Value], axis: int) -> Value:
    return matrices[0] if len(matrices) == 1 else lax.concatenate(_promoted(matrices), axis)


def _promoted(arrays: Sequence[Value]) -> list[Value]:
    """The arrays, converted to their common dtype."""
    dtype = common_dtype(x.dtype for x in arrays)
    return [x.astype(dtype) for x in arrays]
