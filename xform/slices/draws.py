"""Draw a slice of random bits: the same bits as in the draw of the whole.

JAX's default generator, threefry, encrypts the number of each element with the key, if the flag
`jax_threefry_partitionable` is set, as it is by default. So a slice of the elements can be drawn on
its own. A draw in slices holds only the bits of one slice, such as those of the dropout masks of a
part of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from xform._jax import JaxprEqn, jax_primitives
from xform.program.arithmetic import Value


def draws_each_element(eqn: JaxprEqn) -> bool:
    """Return whether an equation draws 32 bits for each element on its own, from one key."""
    config: Any = jax.config
    if eqn.primitive is not jax_primitives.random_bits_p or not config.jax_threefry_partitionable:
        return False
    avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    key, bits = avals
    if key.shape or key.dtype.name != "key<fry>" or not _types_without_shards(key, bits):
        return False
    few = math.prod(eqn.params["shape"]) < 2**32  # the number of an element has 32 bits
    return few and eqn.params["bit_width"] == 32


def _types_without_shards(*avals: Any) -> bool:
    """Return whether types say nothing about shards: they have no mesh, or all its axes are Auto.

    Over `Auto` axes the compiler shards the draw of a slice as it shards its readers.
    """
    meshes = [aval.sharding.mesh for aval in avals]
    return all(kind == AxisType.Auto for mesh in meshes for kind in mesh.axis_types or ())


def draw_slice(
    sizes: Sequence[int], key: Value, axis: int, place: Callable[[Value], Value], length: int
) -> list[Value]:
    """Draw the bits of `length` indices of an axis.

    Args:
      sizes: the shape of the whole draw.
      key: the key.
      axis: the axis along which the draw is sliced.
      place: returns where indices of the slice are on that axis.
      length: the number of indices.
    """
    part = tuple(length if i == axis else size for i, size in enumerate(sizes))
    number = jnp.zeros(part, "uint32")
    for i in range(len(sizes)):
        stride = math.prod(sizes[i + 1 :])
        index = lax.broadcasted_iota(jnp.uint32, part, i)
        if i == axis:
            index = place(index)
        number = number + index * jnp.uint32(stride)
    words = [lax.broadcast(word, part) for word in jax.random.key_data(key)]
    first, second = jax_primitives.threefry2x32_p.bind(*words, jnp.zeros(part, "uint32"), number)
    return [first ^ second]
