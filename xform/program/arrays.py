"""Arrays of a given type that xform makes itself: zeros, constants, unit vectors, random numbers.

A type (`aval`) tells more than shape and dtype: the sharding along `Explicit` mesh axes, the
`shard_map` axes over which the values vary, and the memory that they are in. JAX refuses to combine
values that differ in these. So every array that stands for a tangent, a cotangent or another value
of a program is made here.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from xform._jax import ad, match_weak_type, staging
from xform._jax.contexts import also_wide, wide, wide_if_needed
from xform._jax.meshes import has_explicit_axis


def context_for(*avals: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which JAX can make values of these types, and operate on them.

    It has the mesh of the first type that has one. That mesh differs from the current one inside
    `jax.sharding.auto_axes` and similar functions, which change the types of axes; and a value that
    a `shard_map` closes over has the outer mesh. If a type has a 64-bit dtype, those are enabled.
    """
    meshes = (getattr(getattr(aval, "sharding", None), "mesh", None) for aval in avals)
    mesh = next((mesh for mesh in meshes if mesh is not None and not mesh.empty), None)
    context = contextlib.nullcontext()
    if mesh is not None and mesh != jax.sharding.get_abstract_mesh() and _mesh_is_known():
        context = jax.sharding.use_abstract_mesh(mesh)
    return also_wide(context) if wide(avals) else context


def _mesh_is_known() -> bool:
    """Return whether operations may name the mesh of a type.

    Outside `jit` they may not without `jax.set_mesh`: JAX looks up the devices of the mesh there.
    Then values are placed nowhere, and JAX combines them with placed ones.
    """
    return not jax.sharding.get_abstract_mesh().empty or staging()


def varying(aval: Any) -> frozenset[Any]:
    """Return the `shard_map` axes over which a value of this type varies."""
    kind = getattr(aval, "mat", None)
    return frozenset() if kind is None else kind.varying


def resharded(x: Any, aval: Any) -> Any:
    """Return the array `x` with the sharding of the type `aval` along explicit mesh axes."""
    if not has_explicit_axis(aval) or not _mesh_is_known():
        return x
    same = jax.typeof(x).sharding.spec == aval.sharding.spec
    return x if same else jax.sharding.reshard(x, aval.sharding)


def placed(x: Any, aval: Any) -> Any:
    """Return the array `x`, placed like values of type `aval`, which has its shape.

    The result has the sharding of `aval` along explicit mesh axes, varies over its `shard_map`
    axes, and is in its memory.
    """
    of: Any = jax.typeof(x)
    if axes := varying(aval) - varying(of):
        x = lax.pcast(x, tuple(sorted(axes, key=str)), to="varying")
    x = resharded(x, aval)
    if of.memory_space != aval.memory_space:
        x = jax.device_put(x, aval.memory_space)
    return x


def replicated(x: Any) -> Any:
    """Return the array `x` in the memory of the devices, replicated along explicit mesh axes."""
    aval: Any = jax.typeof(x)
    if aval.memory_space != jax.memory.Space.Device:
        return jax.device_put(x, jax.memory.Space.Device)
    if not has_explicit_axis(aval) or aval.sharding.is_fully_replicated:
        return x
    return jax.sharding.reshard(x, NamedSharding(aval.sharding.mesh, PartitionSpec()))


def converted(x: Any, aval: Any) -> Any:
    """Return the array `x` as a value of type `aval`, which has its shape."""
    with wide_if_needed([aval]):
        return placed(match_weak_type(lax.convert_element_type(x, aval.dtype), aval), aval)


def zeros(aval: Any) -> Any:
    """Return zeros of type `aval`."""
    with context_for(aval):
        is_sharded = hasattr(aval, "sharding") and has_explicit_axis(aval)
        unplaced = is_sharded and not _mesh_is_known()
        x = ad.zeros_like_aval(aval.update(sharding=None) if unplaced else aval)
        host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
        return jax.device_put(x, jax.memory.Space.Host) if host else x


def filled(aval: Any, value: Any) -> Any:
    """Return an array of type `aval` whose elements are all `value`, a real number."""
    sharding = aval.sharding if has_explicit_axis(aval) and _mesh_is_known() else None
    with context_for(aval):
        number = {"f": float, "c": complex}.get(aval.dtype.kind, int)(value)
        # JAX makes weakly typed arrays of its default dtypes from Python numbers.
        weak = aval.weak_type and jax.typeof(number).dtype == aval.dtype
        x = lax.full(aval.shape, number, None if weak else aval.dtype, sharding=sharding)
        return placed(match_weak_type(x, aval), aval)


def stacked(n: int, aval: Any) -> Any:
    """Return the type of `n` values of type `aval`, stacked along a new leading axis."""
    old = aval.sharding.spec
    spec = PartitionSpec(None, *old.partitions, unreduced=old.unreduced, reduced=old.reduced)
    sharding = NamedSharding(aval.sharding.mesh, spec)
    return aval.update(shape=(n, *aval.shape), sharding=sharding)


def basis(avals: Sequence[Any]) -> list[Any]:
    """Return the standard basis of the space of values of types `avals`.

    There is one array for each type, with a new leading axis for the vectors. The length of this
    axis is the number of elements of all values.

    The basis is computed in the program, because a constant in the program would grow with the
    square of that length. XLA also recognizes a computed basis as a mask, and replaces products
    with it by selects. So 0 times an infinite derivative gives 0, not NaN.
    """
    sizes = [math.prod(aval.shape) for aval in avals]
    with wide_if_needed(avals):
        n = sum(sizes)
        eye = jnp.eye(n, dtype=common_dtype(aval.dtype for aval in avals))
        parts = jnp.split(eye, np.cumsum(sizes)[:-1], axis=1)
        return [converted(part.reshape(n, *aval.shape), stacked(n, aval))
                for part, aval in zip(parts, avals, strict=True)]  # fmt: skip


def random(draw: Callable[..., Any], key: Any, aval: Any) -> Any:
    """Return an array of type `aval` of random numbers.

    `draw` is the function of `jax.random` that draws them, such as `jax.random.normal`.
    """
    with wide_if_needed([aval]):
        return placed(draw(key, aval.shape, aval.dtype), aval)


def common_dtype(dtypes: Iterable[Any]) -> Any:
    """Return the dtype that all dtypes promote to, also under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)
