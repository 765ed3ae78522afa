"""The names of the axes of parameters, and the axes of a mesh on which they lie by default.

A parameter says what its axes are ("embed", "mlp"); only the rules say where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

# A mesh of these has data, fsdp, tensor, expert, or some of them: what it lacks is passed over.
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
