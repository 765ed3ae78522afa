"""The mesh in a type of JAX's: along `Explicit` axes a type says where its values lie."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.sharding import AxisType


def explicit(aval: Any) -> bool:
    """Whether a type says where its values lie, along some axes of a mesh at least."""
    return AxisType.Explicit in aval.sharding.mesh.axis_types


def argument(aval: Any) -> jax.ShapeDtypeStruct:
    """A type as that of an argument to compile for; it lies where the type says."""
    place = aval.sharding if explicit(aval) else None
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place, weak_type=weak)


def on_mesh_of(*avals: Any) -> contextlib.AbstractContextManager[Any]:
    """Within, operations are on the mesh of the first type that has one, if there is such a type.

    It is another than that around where `jax.sharding.auto_axes` and its like change axes.
    """
    there = (getattr(getattr(aval, "sharding", None), "mesh", None) for aval in avals)
    mesh = next((mesh for mesh in there if mesh is not None and not mesh.empty), None)
    if mesh is None or mesh == jax.sharding.get_abstract_mesh():
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)
