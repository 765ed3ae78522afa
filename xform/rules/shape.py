"""Rules of data movements: reshapes, slices, copies, names, shardings.

All are linear. A function such as `_reshape(ct, x, ...)` is the transpose: it moves the cotangent
`ct` of the output back to the shape of the input `x`. On a mesh of explicit axes, it also gives the
cotangent the input's sharding. A function such as `_move_reshape` does in NumPy what the primitive
does. It is applied to element numbers, to find the sparsity pattern of a Jacobian.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.experimental.layout import with_layout_constraint

from xform._jax import JaxprEqn, primitives
from xform.program.arithmetic import Value, cotangent_sharding, reduce_like
from xform.program.dimensions import shape
from xform.program.ir import Mask, gather
from xform.registry.dependence import ELEMENTWISE_DEPENDENCE, DataMovement, MoveFunction
from xform.registry.ends import Ends, EndsRule, mixes, same_lengths_stay
from xform.registry.table import declare
from xform.registry.traits import CONVERSION, MARK, MOVEMENT, UNFUSED, VIEW, Traits, none
from xform.registry.words import Linear, Passthrough, constant, linear, pointwise


def back(ct: Value, x: Value) -> Value:
    """Return `ct` in the shape of `x`, with the sharding of the cotangent of `x`."""
    return lax.reshape(ct, np.shape(x), out_sharding=cotangent_sharding(x))


def with_movement(traits: Traits, move: MoveFunction, ends: EndsRule | None = None) -> Traits:
    """Return the traits with a dependence: `move` does in NumPy what the primitive does.

    `ends` says how the axes of the operands end; None: all are mixed.
    """
    return dataclasses.replace(traits, dependence=DataMovement(move), ends=ends)


# Views.


def _broadcast_in_dim(ct: Value, x: Value, *, shape: Sequence[int],
                      broadcast_dimensions: Sequence[int], sharding: Any = None):  # fmt: skip
    sizes = zip(np.shape(x), broadcast_dimensions, strict=True)
    kept = {axis for n, axis in sizes if n == shape[axis]}
    axes = [i for i in range(len(shape)) if i not in kept]
    sharding_of_ct = cotangent_sharding(x)
    if sharding_of_ct.spec.unreduced and np.ndim(x) == len(kept):  # each device sums its own part
        return lax.reduce_sum(ct, axes, out_sharding=sharding_of_ct)
    return back(lax.reduce_sum(ct, axes), x)


def _reshape(ct: Value, x: Value, *, new_sizes: Any, dimensions: Any, sharding: Any = None):
    if dimensions is None:
        return back(ct, x)
    ct = lax.reshape(ct, [np.shape(x)[d] for d in dimensions])
    return lax.transpose(ct, np.argsort(dimensions))


def _broadcast_to(ct: Value, x: Value, *, shape: Sequence[int]):
    return reduce_like(lax.reduce_sum(ct, range(len(shape) - np.ndim(x))), x)


def _move_broadcast(p: dict[str, Any], x: np.ndarray, *_: Any) -> np.ndarray:
    sizes = dict(zip(p["broadcast_dimensions"], x.shape, strict=True))
    aligned = x.reshape([sizes.get(axis, 1) for axis in range(len(p["shape"]))])
    return np.broadcast_to(aligned, p["shape"])


def _move_reshape(p: dict[str, Any], x: np.ndarray, *_: Any) -> np.ndarray:
    x = x if p["dimensions"] is None else x.transpose(p["dimensions"])
    return x.reshape(p["new_sizes"])


def _broadcast_ends(eqn: JaxprEqn) -> list[Ends]:
    """All axes stay, among new ones."""
    return [tuple(eqn.params["broadcast_dimensions"]), *[()] * (len(eqn.invars) - 1)]


def _last_axes(eqn: JaxprEqn) -> list[Ends]:
    """All axes stay, as the last ones."""
    ndim = len(eqn.params["shape"])
    return [tuple(range(ndim - len(shape(eqn.invars[0])), ndim))]


def _permuted(eqn: JaxprEqn) -> list[Ends]:
    """All axes stay, in another order."""
    return [tuple(int(j) for j in np.argsort(eqn.params["permutation"]))]


_BROADCAST = dataclasses.replace(VIEW, result_shape="shape")
linear("broadcast_in_dim", _broadcast_in_dim, traits=with_movement(
    _BROADCAST, _move_broadcast, _broadcast_ends))  # fmt: skip
linear("broadcast_to", _broadcast_to, traits=with_movement(
    _BROADCAST, lambda p, x: np.broadcast_to(x, p["shape"]), _last_axes))  # fmt: skip
_RESHAPE = dataclasses.replace(
    VIEW, result_shape="new_sizes", reshapes=lambda e: e.params["dimensions"] is None
)
linear("reshape", _reshape, traits=with_movement(_RESHAPE, _move_reshape))
linear("squeeze", lambda ct, x, *, dimensions: back(ct, x), traits=with_movement(
    dataclasses.replace(VIEW, reshapes=True), lambda p, x: x.squeeze(p["dimensions"]),
))  # fmt: skip
linear(
    "transpose",
    lambda ct, x, *, permutation: lax.transpose(ct, np.argsort(permutation)),
    traits=with_movement(MOVEMENT, lambda p, x: x.transpose(p["permutation"]), _permuted),
)
REVERSED = with_movement(MOVEMENT, lambda p, x: np.flip(x, p["dimensions"]), mixes("dimensions"))
linear("rev", lambda ct, x, *, dimensions: lax.rev(ct, dimensions), traits=REVERSED)

# Parts of arrays.


def _pad(ct: Value, x: Value, value: Value, *, padding_config: Sequence[tuple[int, int, int]]):
    low, high, interior = np.asarray(padding_config, int).reshape(-1, 3).T.tolist()
    # Negative padding crops. So padding by the negated amounts removes the padding, and puts zeros
    # in place of the elements of `x` that the forward operation cropped.
    negated = [(-lo, -hi, 0) for lo, hi in zip(low, high, strict=True)]
    inner = lax.pad(ct, np.zeros((), ct.dtype), negated)
    steps = [i + 1 for i in interior]
    ct_x = lax.slice(inner, [0] * ct.ndim, inner.shape, steps) if any(interior) else inner
    axes = tuple(range(ct.ndim))
    return [ct_x, lax.sub(lax.reduce_sum(ct, axes), lax.reduce_sum(ct_x, axes))]


def _slice(ct: Value, x: Value, *, start_indices: Sequence[int], limit_indices: Sequence[int],
           strides: Sequence[int] | None):  # fmt: skip
    config = []
    steps = strides or (1,) * ct.ndim
    for n, m, start, step in zip(np.shape(x), ct.shape, start_indices, steps, strict=True):
        end = start + (m - 1) * step + 1 if m else start
        config.append((start, n - end, step - 1))
    return lax.pad(ct, np.zeros((), ct.dtype), config)


def _tile(ct: Value, x: Value, *, reps: Sequence[int]):
    shape = [n for pair in zip(reps, np.shape(x), strict=True) for n in pair]
    sharding = cotangent_sharding(x)
    parts = [s for axis in sharding.spec.partitions for s in (None, axis)]
    spec = sharding.spec.update(partitions=parts)
    ct = lax.reshape(ct, shape, out_sharding=sharding.update(spec=spec))
    return lax.reduce_sum(ct, range(0, len(shape), 2))


def _move_pad(p: dict[str, Any], x: np.ndarray, value: np.ndarray) -> np.ndarray:
    low, high, interior = np.asarray(p["padding_config"], int).reshape(-1, 3).T
    extent = np.maximum(0, np.array(x.shape, int) + (np.array(x.shape, int) - 1) * interior)
    out = np.full(low + extent + high, value)
    target, source = [], []  # slices of `out` and of `x`
    for n, lo, size, step in zip(x.shape, low, out.shape, interior + 1, strict=True):
        first = -(min(lo, 0) // step)  # the first element that is not cropped
        last = min(n, -(-(size - lo) // step))
        target.append(slice(lo + first * step, max(0, lo + (last - 1) * step + 1), step))
        source.append(slice(first, last) if last > first else slice(0, 0))
        target[-1] = target[-1] if last > first else slice(0, 0)
    out[tuple(target)] = x[tuple(source)]
    return out


def _move_slice(p: dict[str, Any], x: np.ndarray) -> np.ndarray:
    steps = p["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], steps))]


def _move_split(p: dict[str, Any], x: np.ndarray) -> list[np.ndarray]:
    return np.split(x, np.cumsum(p["sizes"])[:-1], p["axis"])


def _move_unstack(p: dict[str, Any], x: np.ndarray) -> list[np.ndarray]:
    return list(np.moveaxis(x, p["axis"], 0))


def _unpadded(eqn: JaxprEqn) -> list[Ends]:
    """The axes that are not padded stay."""
    padding = eqn.params["padding_config"]
    return [tuple(i if tuple(p) == (0, 0, 0) else None for i, p in enumerate(padding)), ()]


linear("pad", _pad, traits=with_movement(MOVEMENT, _move_pad, _unpadded))
_PART = dataclasses.replace(MOVEMENT, part_shape="limit_indices")
linear("slice", _slice, traits=with_movement(_PART, _move_slice, same_lengths_stay))
linear("tile", _tile, traits=with_movement(
    MOVEMENT, lambda p, x: np.tile(x, p["reps"]), same_lengths_stay))  # fmt: skip
linear(
    "concatenate",
    lambda ct, *xs, dimension: lax.split(ct, [np.shape(x)[dimension] for x in xs], dimension),
    traits=with_movement(
        MOVEMENT, lambda p, *xs: np.concatenate(xs, p["dimension"]), mixes("dimension")
    ),
)
linear("split", lambda cts, x, *, sizes, axis: lax.concatenate(cts, axis), traits=with_movement(
    MOVEMENT, _move_split, mixes("axis")))  # fmt: skip
linear("stack", lambda ct, *xs, axis: lax.unstack(ct, axis), traits=with_movement(
    MOVEMENT, lambda p, *xs: np.stack(xs, p["axis"])))  # fmt: skip
linear("unstack", lambda cts, x, *, axis: lax.stack(cts, axis), traits=with_movement(
    MOVEMENT, _move_unstack))  # fmt: skip

# Copies, names and shardings.

# The traits of `checkpoint_name`: an identity that costs nothing to recompute.
NAME = Traits("movement", identity=True, bytes=none, label="name")


class _DevicePut(Passthrough):
    """The rule of `device_put`. A cotangent goes back to the device or memory of the operand."""

    def narrow_params(self, params: dict[str, Any], on: Mask) -> dict[str, Any]:
        return {k: tuple(gather(v, on)) for k, v in params.items()}

    def transpose_params(self, params: dict[str, Any]) -> dict[str, Any]:
        copy = tuple(type(c).ALWAYS_COPY for c in params["copy_semantics"])  # also if donated
        return {"devices": params["srcs"], "srcs": params["devices"], "copy_semantics": copy}


def _sharding_constraint(ct: Value, x: Value, *, sharding: Any, layout: Any, context_mesh: Any,
                         unconstrained_dims: Any):  # fmt: skip
    params = {"sharding": sharding, "layout": layout, "context_mesh": context_mesh}
    constrain = primitives()["sharding_constraint"].bind
    return constrain(ct, **params, unconstrained_dims=unconstrained_dims)


def _to_local(ct: Value, x: Value, *, global_mesh: Any, pspec: Any):
    return multihost_utils.global_array_to_host_local_array(ct, global_mesh, pspec)


def _to_global(ct: Value, x: Value, *, global_mesh: Any, pspec: Any):
    return multihost_utils.host_local_array_to_global_array(ct, global_mesh, pspec)


def _as_dtype_of(ct: Value, x: Value) -> Value:
    return lax.convert_element_type(ct, jax.typeof(x).dtype)


def _to_memory_space_of(ct: Value, x: Value, *, memory_space: Any):
    return jax.device_put(ct, jax.typeof(x).memory_space)


# The traits of a move to another memory or device: the elements keep their indices.
TRANSFER = dataclasses.replace(UNFUSED, dependence=ELEMENTWISE_DEPENDENCE)

linear("to_edtype", lambda ct, x, *, edtype: _as_dtype_of(ct, x), traits=UNFUSED)
linear("from_edtype", lambda ct, x, *, dtype: _as_dtype_of(ct, x), traits=UNFUSED)
linear("copy", lambda ct, x: ct, traits=CONVERSION)
linear("stage", lambda ct, x: ct, traits=CONVERSION)
# `tie` returns `y`, but not before `x` is available.
linear("tie", lambda ct, x, y: ct, argnums=(1,), traits=with_movement(MOVEMENT, lambda p, x, y: y))
linear("xla_metadata_value", lambda ct, x, *, xla_metadata_kvs: ct, traits=CONVERSION)
linear("with_memory_space_constraint", _to_memory_space_of, traits=TRANSFER)
# Tangents and cotangents get no name, because a policy that saves values by name would save them.
pointwise("name", lambda y, x, *, name: 1, traits=NAME)
declare(
    Passthrough,
    "optimization_barrier",
    "linear",
    (),
    Traits(pure=False, flops=none, dependence=ELEMENTWISE_DEPENDENCE),
)
declare(
    _DevicePut,
    "device_put",
    "linear",
    (),
    Traits(foreign=True, flops=none, dependence=ELEMENTWISE_DEPENDENCE),
    supported_params=("devices", "srcs", "copy_semantics"),
)
linear("sharding_constraint", _sharding_constraint, traits=MARK)
linear(
    "layout_constraint", lambda ct, x, *, layout: with_layout_constraint(ct, layout), traits=MARK
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Reshard(Linear):
    """The rule of `reshard`. The transpose reshards the cotangent to the sharding of the input.

    The transpose is bound even if the sharding stays the same, because a `vmap` around it may shard
    the mapped axis.
    """

    def pull(self, eqn: JaxprEqn, xs: Sequence[Value], ys: Sequence[Value], cts: Sequence[Value],
             active: Mask):  # fmt: skip
        target = cotangent_sharding(xs[0])
        with jax.sharding.use_abstract_mesh(target.mesh):
            return [eqn.primitive.bind(*cts, **{**eqn.params, "dst_sharding": target})]


declare(_Reshard, "reshard", "linear", (), TRANSFER,
        supported_params=("dst_sharding", "concrete_mesh"))  # fmt: skip
linear("host_local_array_to_global_array", _to_local, traits=UNFUSED)
linear("global_array_to_host_local_array", _to_global, traits=UNFUSED)

constant("iota", supported_params=("dtype", "shape", "dimension", "sharding"),
         traits=dataclasses.replace(
             MOVEMENT, result_shape="shape", counts="dimension"))  # fmt: skip
constant("empty", "empty2", traits=MOVEMENT)
