"""The mesh in a JAX type. Along `Explicit` mesh axes, the type tells the sharding of the value."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding


def has_explicit_axis(aval: Any) -> bool:
    """Return whether a type tells the sharding of its values, along at least one mesh axis."""
    return AxisType.Explicit in aval.sharding.mesh.axis_types


def shape_dtype_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the `jax.ShapeDtypeStruct` of a type, with its sharding if the type tells it."""
    sharding = aval.sharding if has_explicit_axis(aval) else None
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def explicit_mesh_of(tree: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context that sets the mesh of the first array of a tree on a mesh of explicit axes.

    If a mesh is already set, the context does nothing. Use it outside `jit`.
    """
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(tree))
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    known = [m for m in meshes if isinstance(m, Mesh) and AxisType.Explicit in m.axis_types]
    if known and jax.sharding.get_abstract_mesh().empty:
        return jax.set_mesh(known[0])
    return contextlib.nullcontext()


def auto_axes(mesh: Any) -> dict[str, int]:
    """Return the sizes of the `Auto` axes of a mesh that have several devices."""
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {axis: n for axis, n, kind in kinds if kind == AxisType.Auto and n > 1}
