"""The names of the axes of parameters, and the axes of a mesh on which they lie by default.

A parameter says what its axes are ("embed", "mlp"); only the rules say where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

# What a mesh may have; a batch's sequences are shared by those in BATCH.
MESH_AXES = ("data", "fsdp", "expert", "tensor")
BATCH = ("data", "fsdp", "expert")
# Of parameters. An axis that a mesh lacks is passed over.
RULES: dict[str, str | None] = {
    "vocab": "tensor",
    "embed": "fsdp",  # the width of the residual stream
    "mlp": "tensor",  # the hidden width of a perceptron, or of a recurrent state
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "expert": "expert",
    "layers": None,  # of a scanned stack
    "position": None,
    "gates": None,
    "norm": None,  # scales and offsets: small
    "height": None,
    "width": None,
    "channels_in": "fsdp",
    "channels": "tensor",
    "classes": None,
}

_EXPLICIT = (
    "these models let the compiler place what they make, and the mesh around has Explicit axes:"
    " call them within jax.sharding.auto_axes(f, out_sharding=...), or make the mesh with"
    " axis_types=(jax.sharding.AxisType.Auto, ...)"
)


def named(*names: str) -> dict[str, Any]:
    """NNX's metadata of a parameter with these axes. No mesh need be there when it is made."""
    return {"out_sharding": names, "eager_sharding": False}


def spec(
    names: Sequence[str],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    rules: Mapping[str, str | None] = RULES,
) -> PartitionSpec:
    """Where an array with these axes lies on a mesh.

    An axis is on every device alike if the mesh has no axis for it, if an earlier one took that,
    or if its size is no multiple.
    """
    taken: list[str | None] = []
    for name, size in zip(names, shape, strict=True):
        place = rules[name]
        free = place in mesh.shape and place not in taken and size % mesh.shape[place] == 0
        taken.append(place if free else None)
    return PartitionSpec(*taken)


def constrained(x: jax.Array, *names: str | None) -> jax.Array:
    """What a layer makes, `x`, with its axes where the devices want them.

    "batch" lies as sequences do, None on each device alike, and others as by the rules. Without a
    mesh around that has such axes and several devices it stays as it is; so it does over the axes
    of a `jax.shard_map` around.

    Raises:
      ValueError: axes of the mesh are `Explicit`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit in kinds.values():
        raise ValueError(_EXPLICIT)
    there = {axis: mesh.shape[axis] for axis in MESH_AXES if kinds.get(axis) is AxisType.Auto}
    if math.prod(there.values()) == 1:
        return x
    places: list[Any] = []
    for name, size in zip(names, x.shape, strict=True):
        shared = BATCH if name == "batch" else (RULES[name],) if name else ()
        axes = tuple(axis for axis in shared if axis in there)
        parts = math.prod(there[axis] for axis in axes)
        places.append(axes if axes and size % parts == 0 else None)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*places))


def by_example(x: jax.Array) -> jax.Array:
    """Examples `[B, ...]` that a layer reads: each device has some, and the whole of these.

    Of layers that do not say so XLA has made wrong gradients: see the limits in `README.md`.
    """
    return constrained(x, "batch", *[None] * (x.ndim - 1))


def shardings(
    state: nnx.State, mesh: Mesh | AbstractMesh, rules: Mapping[str, str | None] = RULES
) -> nnx.State:
    """The sharding of each variable of a model's state, by the names of its axes."""

    def place(variable: nnx.Variable[Any]) -> Any:
        names = variable.get_metadata().get("out_sharding") or ()
        array = variable.get_value()
        where = spec(names, array.shape, mesh, rules) if names else PartitionSpec()
        return variable.replace(NamedSharding(mesh, where))

    return jax.tree.map(place, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
