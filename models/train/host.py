"""The memory of a host, in which what only the end of a step reads may wait between steps."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from models.errors import InputError

Tree = TypeVar("Tree")

HOST = "pinned_host"


def check_host(device: Any) -> None:
    """Refuse a device that cannot reach such a memory.

    Raises:
      InputError: it is not among those that the device names.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise InputError(
            f"--offload-optimizer: {device.device_kind} has no memory of its host ({HOST}), but"
            f" {' and '.join(kinds)}: leave it out"
        )


def on_host(x: Any) -> bool:
    """Whether an array, or what a type or sharding says of one, lies there."""
    return getattr(getattr(x, "sharding", x), "memory_kind", None) == HOST


def fetched(tree: Tree, after: jax.Array) -> Tree:
    """Arrays that lie on devices, within a step: none is there before `after` is.

    Else a compiler may bring all of them before the backward pass, whose peak they would be in.
    """

    def fetch(x: jax.Array) -> jax.Array:
        return brought(jax.lax.optimization_barrier((x, after))[0]) if _waits(x) else x

    return jax.tree.map(fetch, tree)


def brought(tree: Tree) -> Tree:
    """Arrays that lie on devices, within a function that JAX compiles: those that wait are read."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if _waits(x) else x, tree
    )


def put(tree: Tree, places: Any) -> Tree:
    """Arrays as their shardings say, each in its memory, within a step."""

    def one(x: jax.Array, place: Any) -> jax.Array:
        if not on_host(place):
            return jax.lax.with_sharding_constraint(x, place)
        # Of a move to another memory XLA reads that alone, and parts the array as it likes.
        parted = jax.lax.with_sharding_constraint(x, place.with_memory_kind("device"))
        return jax.device_put(parted, place)

    return jax.tree.map(one, tree, places)


def _waits(x: Any) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Host
