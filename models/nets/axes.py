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

# The axes that a mesh may have. The examples of a batch are sharded over the mesh axes in BATCH,
# and the tokens of a sequence over CONTEXT.
MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")
BATCH = ("data", "fsdp", "expert")
CONTEXT = "context"
Axes = str | tuple[str, ...] | None
# The mesh axes of each parameter axis. A mesh axis that a mesh lacks is ignored.
RULES: dict[str, Axes] = {
    "vocab": "tensor",
    "embed": ("fsdp", CONTEXT),  # the width of the residual stream
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
    "channels_in": ("fsdp", CONTEXT),
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
    rules: Mapping[str, Axes] = RULES,
) -> PartitionSpec:
    """Return the PartitionSpec of an array over a mesh. Its axes have these names and sizes.

    An axis is replicated if the mesh has no axis for it, if an earlier axis of the array uses that
    mesh axis, or if its size is not a multiple of the mesh axis. An axis with several mesh axes is
    sharded over the first of them if it cannot be sharded over all.
    """
    entries: list[Axes] = []
    taken: set[str] = set()
    for name, size in zip(names, shape, strict=True):
        there = [axis for axis in _axes(rules[name]) if axis in mesh.shape and axis not in taken]
        there = [axis for axis in there if mesh.shape[axis] > 1] or there[:1]
        while there and size % math.prod(mesh.shape[axis] for axis in there):
            there.pop()
        taken.update(there)
        entries.append(tuple(there) if len(there) > 1 else there[0] if there else None)
    return PartitionSpec(*entries)


def _axes(axes: Axes) -> tuple[str, ...]:
    """Return the mesh axes of an entry of the rules."""
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def constrained(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrain the sharding of `x`, a value inside a layer, by the names of its axes.

    `x` is returned unchanged if the current mesh has none of these axes or one device.

    Raises:
      ValueError: the mesh has `Explicit` axes.
    """
    if math.prod(_automatic().values()) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, present_spec(x.shape, *names))


def present_spec(shape: Sequence[int], *names: str | None) -> PartitionSpec:
    """Return the PartitionSpec, over the current mesh, of a value inside a layer.

    "batch" is sharded over the axes in `BATCH`, "sequence" over `CONTEXT`, None is replicated, and
    other names follow the rules. Axes of an enclosing `jax.shard_map` are ignored.
    """
    sizes = _automatic()
    rules = {**RULES, "batch": BATCH, "sequence": CONTEXT}
    entries: list[Any] = []
    for name, size in zip(names, shape, strict=True):
        wanted = _axes(rules[name]) if name else ()
        axes = tuple(axis for axis in wanted if axis in sizes)
        parts = math.prod(sizes[axis] for axis in axes)
        entries.append(axes if axes and size % parts == 0 else None)
    return PartitionSpec(*entries)


def context_devices() -> int:
    """Return how many devices of the current mesh share a sequence."""
    return _automatic().get(CONTEXT, 1)


def _automatic() -> dict[str, int]:
    """Return the sizes of the axes of the current mesh that models may use."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit in kinds.values():
        raise ValueError(_EXPLICIT)
    return {axis: mesh.shape[axis] for axis in MESH_AXES if kinds.get(axis) is AxisType.Auto}


def by_example(x: jax.Array) -> jax.Array:
    """Shard the input `[B, ...]` of a layer along its first axis: each device has whole examples.

    Without this constraint XLA has computed wrong gradients: see the limits in `README.md`.
    """
    return constrained(x, "batch", *[None] * (x.ndim - 1))


def by_token(x: jax.Array) -> jax.Array:
    """Shard the input `[B, T, ...]` of a layer along its examples and its sequence."""
    return constrained(x, "batch", "sequence", *[None] * (x.ndim - 2))


def shardings(
    state: nnx.State, mesh: Mesh | AbstractMesh, rules: Mapping[str, Axes] = RULES
) -> nnx.State:
    """Return the sharding of each variable of a model's state, by the names of its axes."""

    def sharding(variable: nnx.Variable[Any]) -> Any:
        names = variable.get_metadata().get("out_sharding") or ()
        array = variable.get_value()
        partition = spec(names, array.shape, mesh, rules) if names else PartitionSpec()
        return variable.replace(NamedSharding(mesh, partition))

    return jax.tree.map(sharding, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
