"""The outputs of a loop over slices: what the loop carries for each, or that the scan stacks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from xform._jax import Var
from xform.program.arithmetic import Value
from xform.program.arrays import zeros
from xform.program.equation import read
from xform.registry.table import traits
from xform.slices.region import Region
from xform.slices.resize import CurrentSlice, sum_dtype
from xform.slices.shards import merge, mesh_axes, partitions, reshape, split
from xform.slices.slicing import SlicedAxis, Slicing, first_axis


class SlicedOutput:
    """An output of type `aval` of a loop over slices.

    Attributes:
      start: the initial value that the loop carries; None if the scan stacks the slices.
    """

    def __init__(self, aval: Any):
        self._aval = aval
        self.start: Value = zeros(aval.update(weak_type=False))

    def after(self, carried: Value, value: Value, at: CurrentSlice) -> tuple[Value, Value]:
        """Return the carried value after a slice with this value, and the value to stack."""
        if self.start is None:
            return None, value
        return self._carry(carried, lax.convert_element_type(value, self.start.dtype), at), None

    def _carry(self, carried: Value, value: Value, at: CurrentSlice) -> Value:
        """Return the carried value after a slice with this value."""
        raise NotImplementedError

    def joined(self, carried: Value, stacked: Value) -> Value:
        """Return the output, from its carried or stacked value."""
        return self._join(stacked if self.start is None else carried)

    def _join(self, value: Value) -> Value:
        """Return the output, from the value that the loop carried or stacked."""
        return lax.convert_element_type(value, self._aval.dtype)


class Stacked(SlicedOutput):
    """An output whose slices the scan stacks."""

    def __init__(self, aval: Any):
        self._aval, self.start = aval, None

    def _join(self, value: Value) -> Value:
        return reshape(value, self._aval.shape, *partitions(self._aval))


class Written(SlicedOutput):
    """An output that is written slice by slice, each at its place along an axis."""

    def __init__(self, aval: Any, axis: int):
        super().__init__(aval)
        self._axis = axis

    def _carry(self, carried: Value, value: Value, at: CurrentSlice) -> Value:
        offset = at.offset(self._aval.shape[self._axis])
        return lax.dynamic_update_slice_in_dim(carried, value, offset, self._axis)


class InShards(SlicedOutput):
    """Like `Written`, for a sharded axis: the loop carries the slices on an axis of their own."""

    def __init__(self, aval: Any, axis: int, region: Region):
        super().__init__(aval)
        self._axis = axis
        self.start = split(self.start, axis, region.n, region.shards)

    def _carry(self, carried: Value, value: Value, at: CurrentSlice) -> Value:
        part = split(value, self._axis, 1, at.shards)
        return lax.dynamic_update_slice_in_dim(carried, part, at.number, self._axis + 1)

    def _join(self, value: Value) -> Value:
        return super()._join(merge(value, self._axis))


class SumOfSlices(SlicedOutput):
    """An output that is the sum of the terms of the slices."""

    def __init__(self, aval: Any):
        super().__init__(aval.update(dtype=sum_dtype(aval.dtype)))
        self._aval = aval

    def _carry(self, carried: Value, value: Value, at: CurrentSlice) -> Value:
        return carried + value


class AddedInPlace(SlicedOutput):
    """An output that starts with a value of the program. Each slice adds to it by itself."""

    def __init__(self, aval: Any, start: Value):
        self._aval = aval
        self.start = lax.convert_element_type(start, sum_dtype(aval.dtype))

    def _carry(self, carried: Value, value: Value, at: CurrentSlice) -> Value:
        return value


class Same(SlicedOutput):
    """An output that is the same in each slice."""

    def _carry(self, carried: Value, value: Value, at: CurrentSlice) -> Value:
        return value


def in_shards(aval: Any, axis: int, region: Region) -> bool:
    """Return whether the sliced axis is sharded, so that each slice takes a part of every shard."""
    return region.shards > 1 or bool(mesh_axes(aval, axis))


def joined_along(aval: Any, axis: int, region: Region) -> SlicedOutput:
    """Return an output of a region whose slices are joined along an axis."""
    if in_shards(aval, axis, region):
        return InShards(aval, axis, region)
    return Stacked(aval) if first_axis(aval.shape, axis) else Written(aval, axis)


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
        return Same(y.aval)
    (eqn,) = [e for e, _ in region.equations if y in e.outvars]
    if not traits(eqn.primitive).adds:
        return SumOfSlices(y.aval)
    return AddedInPlace(y.aval, read(full, eqn.invars[0]))


def outputs_after(outputs: Sequence[SlicedOutput], carry: Sequence[Value], values: Sequence[Value],
                  at: CurrentSlice) -> tuple[list[Value], list[Value]]:  # fmt: skip
    """For each output, return the carried value after a slice, and the value to stack."""
    triples = zip(outputs, carry, values, strict=True)
    pairs = [out.after(carried, value, at) for out, carried, value in triples]
    return [carried for carried, _ in pairs], [stacked for _, stacked in pairs]
