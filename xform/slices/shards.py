"""Slices of values that are sharded over devices: each shard is sliced, and nothing is moved.

A type says along which mesh axes a value is sharded, if these are `Explicit`. A sharded axis of
length `L` with `d` shards is sliced within each shard: slice `i` of `n` consists of part `i` of
every shard. So it has the indices `s * L/d + i * L/(d*n) + j` for every shard `s`, and `L/(d*n)`
numbers `j`. To make it, the axis is split into axes of lengths `d`, `n` and `L/(d*n)`, and the
second one is sliced. Types do not tell how values are sharded over `Auto` axes. There the sharding
constraints of the program tell it (`with_sharding_constraint`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xform._jax import JaxprEqn
from xform.program.arithmetic import Value
from xform.program.dimensions import shape
from xform.registry.table import traits


def mesh_axes(aval: Any, axis: int) -> tuple[str, ...]:
    """Return the mesh axes over which an axis of a type is sharded; empty if it is not."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return ()
    part = sharding.spec.partitions[axis]
    return part if isinstance(part, tuple) else () if part is None else (part,)


def shards(aval: Any, axis: int) -> int:
    """Return the number of shards along an axis of a type."""
    return math.prod(aval.sharding.mesh.shape[name] for name in mesh_axes(aval, axis))


def constrained_shards(eqn: JaxprEqn, axis: int) -> int:
    """Return over how many shards a sharding constraint puts an axis; 1 for other equations.

    Only `Auto` axes of a mesh count. Types have the others.
    """
    sharding = eqn.params.get("sharding")
    if not traits(eqn.primitive).identity or not isinstance(sharding, NamedSharding):
        return 1
    part = dict(enumerate(sharding.spec)).get(axis)
    names: Any = part if isinstance(part, tuple) else (part,)
    known = mesh_axes(eqn.outvars[0].aval, axis)
    sizes = sharding.mesh.shape
    return math.prod(sizes[name] for name in names if name in sizes and name not in known)


def shard_length(v: Any, axis: int) -> int:
    """Return the length of an axis of a variable within one shard."""
    return shape(v)[axis] // shards(v.aval, axis)


def has_known_shards(aval: Any) -> bool:
    """Return whether the slices of a type can be found: it may not be within a `shard_map`.

    Sums that are left to be done over a mesh axis (`unreduced`) are not known either.
    """
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return True
    spec = sharding.spec
    partial = getattr(spec, "unreduced", None) or getattr(spec, "reduced", None)
    return AxisType.Manual not in sharding.mesh.axis_types and not partial


def reshape(x: Value, sizes: Sequence[int], *spec: Any) -> Value:
    """Reshape a value. The parts of `spec` say how the axes of the result are sharded."""
    if all(part is None for part in spec):
        return lax.reshape(x, tuple(sizes))
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))
    return lax.reshape(x, tuple(sizes), out_sharding=sharding)


def partitions(aval: Any) -> tuple[Any, ...]:
    """Return how each axis of a type is sharded, as in a `PartitionSpec`."""
    parts = [mesh_axes(aval, axis) for axis in range(len(aval.shape))]
    return tuple(part or None for part in parts)


def split(x: Value, axis: int, n: int, auto: int = 1) -> Value:
    """Split a sharded axis into three: the shards, `n` slices, and the rest of each slice.

    `auto` is the number of shards that the type does not tell.
    """
    aval = jax.typeof(x)
    sizes, spec, d = aval.shape, partitions(aval), auto * shards(aval, axis)
    lengths = d, n, sizes[axis] // (d * n)
    return reshape(x, (*sizes[:axis], *lengths, *sizes[axis + 1 :]),
                   *spec[: axis + 1], None, None, *spec[axis + 1 :])  # fmt: skip


def merge(x: Value, axis: int) -> Value:
    """Merge the three axes that `split` made of one."""
    aval = jax.typeof(x)
    sizes, spec = aval.shape, partitions(aval)
    merged = math.prod(sizes[axis : axis + 3])
    return reshape(x, (*sizes[:axis], merged, *sizes[axis + 3 :]),
                   *spec[: axis + 1], *spec[axis + 3 :])  # fmt: skip
