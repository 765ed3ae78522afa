"""Run a region as a loop over slices.

Slices of an input or output along its first axis are the inputs and outputs of a scan. Slices along
another axis are cut from the whole input, or written to their place in a carried output. Sums are
carried, in float32 if their type is narrower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import Var, match_weak_type
from xform.program.arithmetic import Value
from xform.program.equation import read, write
from xform.program.source import name_stack
from xform.slices.loop_outputs import AddedInPlace, in_shards, outputs_after, region_outputs
from xform.slices.region import Region
from xform.slices.resize import CurrentSlice, resized, run_on_slice
from xform.slices.shards import partitions, reshape
from xform.slices.slicing import first_axis


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
    added = [i for i, out in enumerate(outputs) if isinstance(out, AddedInPlace)]

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
    return first_axis(aval.shape, axis) and not in_shards(aval, axis, region)


def _stack_of_slices(x: Value, axis: int, n: int) -> Value:
    """Return a value with its slices on a leading axis."""
    return reshape(x, (n, *resized(x.shape, axis, n)), None, *partitions(jax.typeof(x)))
