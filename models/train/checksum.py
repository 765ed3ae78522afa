"""Checksums of arrays that do not depend on their sharding."""

from __future__ import annotations

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.train.host import to_device

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their paths as text."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}


def checksums(leaves: dict[str, jax.Array]) -> dict[str, int]:
    """Compute a checksum of each array. It depends on the bits and position of each element.

    Each device sums its own part. Nothing is gathered.
    """
    return {name: int(n) for name, n in jax.device_get(_checksums(leaves)).items()}


@jax.jit
def _checksums(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(_checksum, leaves)


def _checksum(x: jax.Array) -> jax.Array:
    """Sum a hash of the bits and the position of each element, modulo 2**32."""
    x = to_device(x)
    bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        position = position * np.uint32(size % 2**32) + index
    # Two rounds of a 32-bit mixer make it unlikely that two changes cancel in the sum.
    return jnp.sum(_mixed(bits ^ _mixed(position + np.uint32(1))), dtype=jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """Apply a bijection of 32-bit integers. Each input bit flips about half of the output bits.

    Source: Chris Wellons, "Prospecting for Hash Functions", 2018, the function lowbias32.
    """
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Return whether all floating-point numbers of a tree are finite."""
    floats = [x for x in jax.tree.leaves(to_device(tree)) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()


def checksum_of(data: Any) -> int:
    """Compute the checksum of data that JSON can represent."""
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())
