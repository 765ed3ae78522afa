"""A region of a program that runs in slices, and the values that enter and leave it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any

from xform._jax import JaxprEqn, Var
from xform.interpret.cost import aval_bytes
from xform.program.dimensions import shape
from xform.program.fingerprint import fingerprint
from xform.program.ir import Program
from xform.program.source import frame
from xform.slices.bodies import by_position
from xform.slices.custom_rules import largest_inside
from xform.slices.grow import grow, producers, slicing_of
from xform.slices.joined_sums import joined_sums
from xform.slices.nested import has_body
from xform.slices.opened import closed
from xform.slices.shards import constrained_shards, shard_length
from xform.slices.slicing import Slicing, divides


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A region of a program that runs in `n` slices along an axis.

    Attributes:
      program: the program, with its calls opened.
      start: the value around which the region was found.
      axis: the axis of `start` that is sliced.
      n: the number of slices.
      axes: the axis of each value that the region computes in slices.
      members: the equations of the region, by position in the program, and how each runs.
      shards: over how many shards the axis is sharded by constraints, see `constrained_shards`.
        Each slice has a part of each shard.
      cache: data that is derived from the region.
    """

    program: Program
    start: Var
    axis: int
    n: int
    axes: dict[Var, int]
    members: dict[int, Slicing]
    shards: int = 1
    cache: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any], repr=False)

    def __fingerprint__(self) -> tuple[Any, ...]:
        made = producers(self.program).get(self.start)
        made = made or self.program.inputs.index(self.start)
        numbers = self.axis, self.n, self.shards
        return fingerprint(self.program), made, *numbers, (*self.members.items(),)

    @property
    def equations(self) -> list[tuple[JaxprEqn, Slicing]]:
        """The equations in order, and how each runs."""
        return [(self.program.equations[i], slicing) for i, slicing in self.members.items()]

    @functools.cached_property
    def sliced(self) -> list[tuple[Var, int]]:
        """The inputs that are cut into slices, each with an axis."""
        pairs = (
            (v, axis)
            for eqn, slicing in self.equations
            for v, axis in zip(eqn.invars, slicing.operands, strict=True)
            if axis is not None and isinstance(v, Var) and v not in self.axes
        )
        return list(dict.fromkeys(pairs))

    @functools.cached_property
    def full(self) -> list[Var]:
        """The inputs that every slice reads in full."""
        made = {y for eqn, _ in self.equations for y in eqn.outvars}
        values = (
            v
            for eqn, slicing in self.equations
            for v, axis in zip(eqn.invars, slicing.operands, strict=True)
            if axis is None and isinstance(v, Var) and v not in made
        )
        return list(dict.fromkeys(values))

    @functools.cached_property
    def outputs(self) -> list[tuple[Var, Slicing, int | None]]:
        """The values that are read after the region.

        For each: how the equation that makes it runs, and the axis along which slices of the value
        are joined. The axis is None for a sum over the slices.
        """
        read = {v for v in self.program.outputs if isinstance(v, Var)}
        for i, eqn in enumerate(self.program.equations):
            if i not in self.members:
                read.update(v for v in eqn.invars if isinstance(v, Var))
        return [
            (y, slicing, axis)
            for eqn, slicing in self.equations
            for y, axis in zip(eqn.outvars, slicing.results, strict=True)
            if y in read
        ]

    @functools.cached_property
    def inside_bytes(self) -> int:
        """Bytes of the values that exist only as slices.

        Of a function with a custom rule, the largest value inside it counts.
        """
        leaves = {y for y, _, _ in self.outputs}
        between = sum(aval_bytes(v.aval) for v in self.axes if v not in leaves)
        return between + sum(largest_inside(eqn) for eqn, _ in self.equations)

    def resliced(self, n: int) -> Region | None:
        """Return the same region in `n` slices; None if some of its equations cannot run so.

        If `n` is a multiple of this region's number, no larger region has `n` slices.
        """
        if not all(_runs_in(eqn, slicing, n * self.shards) for eqn, slicing in self.equations):
            return None
        return dataclasses.replace(self, n=n, cache={})

    def in_closed_program(self) -> Region:
        """Return the same region in the program whose other remat regions are closed again."""
        prog, positions = closed(self.program, self.members)
        members = {positions[i]: slicing for i, slicing in self.members.items()}
        return dataclasses.replace(self, program=prog, members=members, cache={})

    @property
    def size(self) -> int:
        """The length of the axis."""
        return shape(self.start)[self.axis]

    @property
    def source(self) -> JaxprEqn:
        """The equation that computes the start; if that is an input, the first of the region."""
        made = producers(self.program).get(self.start)
        return self.program.equations[made[0] if made else min(self.members)]

    @property
    def where(self) -> str:
        """The user's line that computes the start."""
        return frame(self.source)


def _runs_in(eqn: JaxprEqn, slicing: Slicing, n: int) -> bool:
    """Return whether an equation runs in `n` slices along the same axes."""
    if not divides(n, eqn, slicing):
        return False
    operands, results = by_position(slicing.operands), by_position(slicing.results)
    return not has_body(eqn) or slicing_of(eqn, operands, results, n) == slicing


def find_region(prog: Program, v: Var, axis: int, n: int) -> Region | None:
    """Return the largest region around a value that runs in `n` slices along one of its axes.

    Args:
      prog: a program whose calls are opened, see `opened`.
      v: a value of it.
      axis: the axis of the value.
      n: the number of slices. It must divide the length of every sliced axis, within a shard if the
        axis is sharded over devices, by its type or by a sharding constraint. So an equation with
        another length is not part of the region.

    Returns:
      The region; None if no equation computes the value in slices, or reads it in slices. If slices
      of other values leave it besides a sum, and the readers of these values make the sum the only
      output, they are part of it: such a region is a loss.

    Cost: linear in the number of equations. Nothing of the size of a value is allocated.

    >>> from xform.program.ir import trace
    >>> from xform.slices.opened import opened
    >>> from xform.slices.region import find_region
    >>> prog = trace(lambda x, w: [jnp.tanh(x @ w).sum()], jnp.ones((8, 3)), jnp.ones((3, 5)))
    >>> region = find_region(opened(prog), opened(prog).equations[0].outvars[0], 0, 4)
    >>> [eqn.primitive.name for eqn, _ in region.equations]
    ['dot_general', 'tanh', 'reduce_sum']
    """
    if n < 2 or shard_length(v, axis) % n:
        return None
    region = _largest(prog, v, axis, n)
    shards = 1 if region is None else _constrained_shards(region)
    if shards > 1:
        region = _largest(prog, v, axis, n * shards)
    return region and dataclasses.replace(region, n=n, shards=shards, cache={})


def _constrained_shards(region: Region) -> int:
    """Return over how many shards the constraints of a region put the sliced axis."""
    axes = ((eqn, slicing.results[0]) for eqn, slicing in region.equations)
    shards = (constrained_shards(eqn, axis) for eqn, axis in axes if axis is not None)
    return max(shards, default=1)


def _largest(prog: Program, v: Var, axis: int, n: int) -> Region | None:
    """Return the largest region, without regard to sharding constraints."""
    region = _grown(prog, v, axis, n)
    if region is None:
        return None
    joined = [y for y, _, output_axis in region.outputs if output_axis is not None]
    if joined and any(is_number(*output) for output in region.outputs):
        loss = _grown(prog, v, axis, n, joined)
        if loss is not None and len(loss.outputs) == 1 and is_number(*loss.outputs[0]):
            return loss
    return region


def _grown(prog: Program, v: Var, axis: int, n: int, forward: Collection[Var] = ()
           ) -> Region | None:  # fmt: skip
    """Return the region that grows around a value, and forward from other values of it."""
    axes, members = grow(prog, v, axis, n, forward)
    if not members:
        return None
    members = dict(sorted((members | joined_sums(prog, members)).items()))
    return Region(prog, v, axis, n, axes, members)


def is_number(y: Var, slicing: Slicing, axis: int | None) -> bool:
    """Return whether an output of a region is a sum with one element."""
    return axis is None and slicing.summed and math.prod(shape(y)) == 1
