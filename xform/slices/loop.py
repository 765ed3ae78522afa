"""Run a region as a loop over slices.

Slices of an input or output along its first axis are the inputs and outputs of a scan. Slices along
another axis are cut from the whole input, or written to their place in a carried output. Sums are
carried, in float32 if their type is narrower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import Var, match_weak_type
from xform.program.arithmetic import Value
from xform.program.arrays import zeros
from xform.program.equation import read, write
from xform.program.source import name_stack
from xform.registry.table import traits
from xform.slices.region import Region
from xform.slices.resize import CurrentSlice, resized, run_on_slice, sum_dtype
from xform.slices.shards import merge, mesh_axes, partitions, reshape, split
from xform.slices.slicing import SlicedAxis, Slicing, first_axis


def run_in_slices(region: Region, sliced: Sequence[Value], full: Sequence[Value]) -> list[Value]:
    """Run a region as a `lax.scan` over its slices; return its outputs.

    In a derivative, the body of the scan is recomputed: only the inputs of the region and the
    carried sums are saved.

    Args:
      region: the region.
      sliced: the values of `region.sliced`.
      full: the values of `region.full`.
    """
    inputs = SlicedInputs(sliced, region)
    outputs = region_outputs(region, full)
    added = [i for i, out in enumerate(outputs) if out.kind == "added in place"]

    def step(carry: list[Value], x: tuple[Value, list[Value]]) -> tuple[list[Value], list[Value]]:
        at = CurrentSlice(x[0], region.n, region.shards)
        sums = {region.outputs[i][0]: carry[i] for i in added}
        values = run_slice(region, inputs.slices(at, x[1]), full, at, sums)
        return outputs_after(outputs, carry, values, at)

    numbers = jnp.arange(region.n, dtype=np.int32)
    body = jax.checkpoint(step, prevent_cse=False)
    carry, stacked = lax.scan(body, [out.start for out in outputs], (numbers, inputs.scanned))
    joined = [out.joined(*pair) for out, *pair in zip(outputs, carry, stacked, strict=True)]
    return [match_weak_type(y, v.aval)
            for y, (v, _, _) in zip(joined, region.outputs, strict=True)]  # fmt: skip


def run_slice(region: Region, sliced: Sequence[Value], full: Sequence[Value], at: CurrentSlice,
              sums: dict[Var, Value] | None = None) -> list[Value]:  # fmt: skip
    """Run the equations of a region on one slice; return the slice of each output.

    `sums` has the value so far of each sum that an equation adds to in place.
    """
    cuts: dict[Any, Value] = dict(zip(region.sliced, sliced, strict=True))
    env: dict[Var, Value] = dict(zip(region.full, full, strict=True))
    outer = name_stack()
    for eqn, slicing in region.equations:
        # Values made in the region are already slices.
        args = [
            read(env, v) if axis is None or v in region.axes else cuts[v, axis]
            for v, axis in zip(eqn.invars, slicing.operands, strict=True)
        ]
        if sums and eqn.outvars[0] in sums:
            args[0] = sums[eqn.outvars[0]]
        write(env, eqn.outvars, run_on_slice(eqn, slicing, args, at, outer))
    return [env[y] for y, _, _ in region.outputs]


class SlicedInputs:
    """The inputs of a loop that are cut into slices.

    Attributes:
      scanned: the inputs that are cut along their first axis, with the slices on a leading axis.
        None for any other input.
    """

    def __init__(self, values: Sequence[Value], region: Region):
        self._values = [jnp.asarray(x) for x in values]
        self._axes = [axis for _, axis in region.sliced]
        self.scanned = [
            _stack_of_slices(x, axis, region.n) if _is_stack(jax.typeof(x), axis, region) else None
            for x, axis in zip(self._values, self._axes, strict=True)
        ]

    def slices(self, at: CurrentSlice, scanned: Sequence[Value]) -> list[Value]:
        """Return one slice of each input. `scanned` are the scan's own slices of them."""
        triples = zip(self._values, self._axes, scanned, strict=True)
        return [at.cut(x, axis) if part is None else part for x, axis, part in triples]


def _is_stack(aval: Any, axis: int, region: Region) -> bool:
    """Return whether a value can be an input of the scan: its slices lie one after another."""
    return first_axis(aval.shape, axis) and not _in_shards(aval, axis, region)


def _in_shards(aval: Any, axis: int, region: Region) -> bool:
    """Return whether the sliced axis is sharded, so that each slice takes a part of every shard."""
    return region.shards > 1 or bool(mesh_axes(aval, axis))


def _stack_of_slices(x: Value, axis: int, n: int) -> Value:
    """Return a value with its slices on a leading axis."""
    return reshape(x, (n, *resized(x.shape, axis, n)), None, *partitions(jax.typeof(x)))


class SlicedOutput:
    """An output of a loop over slices.

    Attributes:
      kind: "stacked": the scan stacks the slices. "written": each slice is written to its place in
        a carried value. "in shards": the same for a sharded axis; the carried value has its slices
        on an axis of their own. "sum": the terms of the slices are added. "added in place": each
        slice adds to the carried value itself. "same": each slice computes the same value.
      start: the initial value that the loop carries; None if the output is stacked.
    """

    Kind = Literal["stacked", "written", "in shards", "sum", "added in place", "same"]

    def __init__(self, aval: Any, axis: SlicedAxis, kind: Kind, start: Value = None,
                 region: Region | None = None):  # fmt: skip
        self._aval, self._axis, self.kind = aval, axis, kind
        dtype = sum_dtype(aval.dtype) if kind in ("sum", "added in place") else aval.dtype
        self.start: Value = None
        if kind == "stacked":
            return
        if start is not None:
            self.start = lax.convert_element_type(start, dtype)
        else:
            self.start = zeros(aval.update(dtype=dtype, weak_type=False))
        if kind == "in shards":
            assert axis is not None
            assert region is not None
            self.start = split(self.start, axis, region.n, region.shards)

    def after(self, carried: Value, value: Value, at: CurrentSlice) -> tuple[Value, Value]:
        """Return the carried value after a slice with this value, and the value to stack."""
        if self.start is None:
            return None, value
        value = lax.convert_element_type(value, self.start.dtype)
        if self.kind == "sum":
            return carried + value, None
        if self.kind == "written":
            assert self._axis is not None
            offset = at.offset(self._aval.shape[self._axis])
            return lax.dynamic_update_slice_in_dim(carried, value, offset, self._axis), None
        if self.kind == "in shards":
            assert self._axis is not None
            part, place = split(value, self._axis, 1, at.shards), self._axis + 1
            return lax.dynamic_update_slice_in_dim(carried, part, at.number, place), None
        return value, None

    def joined(self, carried: Value, stacked: Value) -> Value:
        """Return the output, from its carried or stacked value."""
        if self.kind == "stacked":
            return reshape(stacked, self._aval.shape, *partitions(self._aval))
        if self.kind == "in shards":
            assert self._axis is not None
            carried = merge(carried, self._axis)
        return lax.convert_element_type(carried, self._aval.dtype)


def joined_along(aval: Any, axis: int, region: Region) -> SlicedOutput:
    """Return an output of a region whose slices are joined along an axis."""
    if _in_shards(aval, axis, region):
        return SlicedOutput(aval, axis, "in shards", region=region)
    return SlicedOutput(aval, axis, "stacked" if first_axis(aval.shape, axis) else "written")


def region_outputs(region: Region, full: Sequence[Value]) -> list[SlicedOutput]:
    """Return the outputs of a region; `full` has the values of `region.full`."""
    in_full = dict(zip(region.full, full, strict=True))
    return [_output(region, in_full, *output) for output in region.outputs]


def _output(region: Region, full: dict[Var, Value], y: Var, slicing: Slicing, axis: SlicedAxis
            ) -> SlicedOutput:  # fmt: skip
    """Return the `SlicedOutput` of an output of a region."""
    if axis is not None:
        return joined_along(y.aval, axis, region)
    if not slicing.summed:
        return SlicedOutput(y.aval, None, "same")
    (eqn,) = [e for e, _ in region.equations if y in e.outvars]
    if not traits(eqn.primitive).adds:
        return SlicedOutput(y.aval, None, "sum")
    return SlicedOutput(y.aval, None, "added in place", read(full, eqn.invars[0]))


def outputs_after(outputs: Sequence[SlicedOutput], carry: Sequence[Value], values: Sequence[Value],
                  at: CurrentSlice) -> tuple[list[Value], list[Value]]:  # fmt: skip
    """For each output, return the carried value after a slice, and the value to stack."""
    triples = zip(outputs, carry, values, strict=True)
    pairs = [out.after(carried, value, at) for out, carried, value in triples]
    return [carried for carried, _ in pairs], [stacked for _, stacked in pairs]
