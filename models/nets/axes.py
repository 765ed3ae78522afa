"""Names of parameter axes, and rules that map them to the axes of a mesh.

A parameter names its axes, such as ("embed", "mlp"). `RULES` maps these names to the axes of a
device mesh. So only the rules decide how parameters are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

# The axes that a mesh may have. The examples of a batch are sharded over the mesh axes in BATCH.
MESH_AXES = ("data", "fsdp", "expert", "tensor")
BATCH = ("data", "fsdp", "expert")
# The mesh axis of each parameter axis. A mesh axis that a mesh lacks is ignored.
RULES: dict[str, str | None] = {
    "vocab": "tensor",
    "embed": "fsdp",  # the width of the residual stream
    "mlp": "tensor",  # the hidden width of a perceptron, or the width of a recurrent state
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "expert": "expert",
    "layers": None,  # the leading axis of a scanned stack
    "position": None,
    "gates": None,
    "norm": None,  # scales and offsets, which are small
    "height": None,
    "width": None,
    "channels_in": "fsdp",
    "channels": "tensor",
    "classes": None,
}

_EXPLICIT = (
    "these models need a mesh with Auto axes, but the current mesh has Explicit axes:"
    " call them within jax.sharding.auto_axes(f, out_sharding=...), or make the mesh with"
    " axis_types=(jax.sharding.AxisType.Auto, ...)"
)


def named(*names: str) -> dict[str, Any]:
    """Return NNX's metadata for a parameter with these axes. Making it needs no mesh."""
    return {"out_sharding": names, "eager_sharding": False}


def spec(
    names: Sequence[str],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    rules: Mapping[str, str | None] = RULES,
) -> PartitionSpec:
    """Return the PartitionSpec of an array over a mesh. Its axes have these names and sizes.

    An axis is replicated if the mesh has no axis for it, if an earlier axis of the array uses that
    mesh axis, or if its size is not a multiple of the mesh axis.
    """
    taken: list[str | None] = []
    for name, size in zip(names, shape, strict=True):
        axis = rules[name]
        usable = axis in mesh.shape and axis not in taken and size % mesh.shape[axis] == 0
        taken.append(axis if usable else None)
    return PartitionSpec(*taken)


def constrained(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrain the sharding of `x`, a value inside a layer, by the names of its axes.

    "batch" is sharded over the axes in `BATCH`, None is replicated, and other names follow the
    rules. `x` is returned unchanged if the current mesh has none of these axes or one device. Axes
    of an enclosing `jax.shard_map` are ignored.

    Raises:
      ValueError: the mesh has `Explicit` axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit in kinds.values():
        raise ValueError(_EXPLICIT)
    sizes = {axis: mesh.shape[axis] for axis in MESH_AXES if kinds.get(axis) is AxisType.Auto}
    if math.prod(sizes.values()) == 1:
        return x
    entries: list[Any] = []
    for name, size in zip(names, x.shape, strict=True):
        wanted = BATCH if name == "batch" else (RULES[name],) if name else ()
        axes = tuple(axis for axis in wanted if axis in sizes)
        parts = math.prod(sizes[axis] for axis in axes)
        entries.append(axes if axes and size % parts == 0 else None)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def by_example(x: jax.Array) -> jax.Array:
    """Shard the input `[B, ...]` of a layer along its first axis: each device has whole examples.

    Without this constraint XLA has computed wrong gradients: see the limits in `README.md`.
    """
    return constrained(x, "batch", *[None] * (x.ndim - 1))


def shardings(
    state: nnx.State, mesh: Mesh | AbstractMesh, rules: Mapping[str, str | None] = RULES
) -> nnx.State:
    """Return the sharding of each variable of a model's state, by the names of its axes."""

    def sharding(variable: nnx.Variable[Any]) -> Any:
        names = variable.get_metadata().get("out_sharding") or ()
        array = variable.get_value()
        partition = spec(names, array.shape, mesh, rules) if names else PartitionSpec()
        return variable.replace(NamedSharding(mesh, partition))

    return jax.tree.map(sharding, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
