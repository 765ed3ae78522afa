"""Offloading of optimizer state to the host's memory between steps."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from models.errors import InputError

Tree = TypeVar("Tree")

HOST = "pinned_host"


def check_host(device: Any) -> None:
    """Check that a device can use pinned host memory.

    Raises:
      InputError: it cannot.
    """
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise InputError(
            f"--offload-optimizer: {device.device_kind} has no host memory ({HOST}), only"
            f" {' and '.join(kinds)}: leave out --offload-optimizer"
        )


def on_host(x: Any) -> bool:
    """Return whether an array, a type or a sharding is in host memory."""
    return getattr(getattr(x, "sharding", x), "memory_kind", None) == HOST


def fetch_after(tree: Tree, after: jax.Array) -> Tree:
    """Copy arrays from host to device memory inside a compiled step, but not before `after` exists.

    Otherwise the compiler may copy all of them before the backward pass, and raise its peak.
    """

    def fetch(x: jax.Array) -> jax.Array:
        return to_device(jax.lax.optimization_barrier((x, after))[0]) if _is_on_host(x) else x

    return jax.tree.map(fetch, tree)


def to_device(tree: Tree) -> Tree:
    """Copy arrays that are in host memory to device memory, inside a compiled function."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if _is_on_host(x) else x, tree
    )


def put(tree: Tree, shardings: Any) -> Tree:
    """Move arrays to their shardings and memories, inside a compiled step."""

    def move(x: jax.Array, sharding: Any) -> jax.Array:
        if not on_host(sharding):
            return jax.lax.with_sharding_constraint(x, sharding)
        # For a copy to another memory XLA ignores the sharding, so shard the array first.
        sharded = jax.lax.with_sharding_constraint(x, sharding.with_memory_kind("device"))
        return jax.device_put(sharded, sharding)

    return jax.tree.map(move, tree, shardings)


def _is_on_host(x: Any) -> bool:
    """Return whether a traced array is in host memory, according to its type."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host
