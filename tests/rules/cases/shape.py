"""Moving data: views, pieces, copies, placements."""

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xform._jax import primitive_named
from xform.testing import Case

V = np.array([0.3, -0.7, 1.4])
M = np.arange(6.0).reshape(2, 3) / 5 - 0.45
N = np.cos(np.arange(6.0)).reshape(2, 3)
T = np.sin(np.arange(24.0)).reshape(2, 3, 4)
EMPTY = np.zeros((0, 3))
SCALAR = np.array(0.8)


def of(name, fun, *args, label="", **fields):
    return Case(name, fun, args, label, **fields)


def here():
    """Return this machine's first device, as a sharding."""
    return NamedSharding(Mesh(jax.devices()[:1], "x"), PartitionSpec())


def broadcast(shape, axes):
    return lambda x: lax.broadcast_in_dim(x, shape, axes)


def pad(*config):
    return lambda x, value: lax.pad(x, value, config)


def pad_with_itself(x):
    corner = lax.squeeze(lax.slice(x, (0, 0), (1, 1)), (0, 1))
    return lax.pad(x, corner, ((1, 2, 0), (-1, 1, 1)))


def bits(x):
    return lax.bitcast_convert_type(x, np.dtype(f"int{8 * x.dtype.itemsize}"))


CASES = [
    of("broadcast_in_dim", broadcast((2, 3), (1,)), V, complex=True),
    of("broadcast_in_dim", broadcast((2, 3), ()), SCALAR, label="scalar"),
    of("broadcast_in_dim", broadcast((4, 3), (0, 1)), M[:1], label="stretch"),
    of("broadcast_in_dim", broadcast((4, 1, 3), (1, 2)), M[:1], label="stretch-not"),
    of("broadcast_in_dim", broadcast((0, 3), (1,)), V, label="to-empty"),
    of("broadcast_in_dim", broadcast((2, 0, 3), (1, 2)), EMPTY, label="empty"),
    of("reshape", lambda x: lax.reshape(x, (3, 2)), M, complex=True),
    of("reshape", lambda x: lax.reshape(x, (4, 6), (2, 0, 1)), T, label="dimensions"),
    of("reshape", lambda x: lax.reshape(x, (1, 1)), SCALAR, label="scalar"),
    of("reshape", lambda x: lax.reshape(x, (3, 0, 2)), EMPTY, label="empty"),
    of("squeeze", lambda x: lax.squeeze(x, (0, 2)), T[:1, :, :1]),
    of("transpose", lambda x: lax.transpose(x, (2, 0, 1)), T, complex=True),
    of("rev", lambda x: lax.rev(x, (0, 2)), T),
    of("concatenate", lambda *x: lax.concatenate(x, 1), M, N[:, :1], N, complex=True),
    of("concatenate", lambda *x: lax.concatenate(x, 0), M, EMPTY, label="empty"),
    of("concatenate", lambda x: lax.concatenate([x, x], 0), V, label="same"),
    of("split", lambda x: tuple(lax.split(x, (1, 2), 1)), M),
    of("split", lambda x: lax.split(x, (1, 0, 2), 1)[2], M, label="one-used"),
    of("stack", lambda *x: lax.stack(x, 1), M, N),
    of("unstack", lambda x: tuple(lax.unstack(x, 1)), M),
    of("tile", lambda x: lax.tile(x, (2, 3)), M),
    of("tile", lambda x: lax.tile(x, (1, 2)), EMPTY, label="empty"),
    of("pad", pad_with_itself, M, label="both", complex=True),
    # JAX's rule fails if only the padding value is active.
    of("pad", pad((1, 2, 0), (0, 1, 0)), M, SCALAR, jax=False, complex=True),
    of("pad", pad((1, 0, 2), (0, 0, 1)), M, SCALAR, jax=False, label="interior"),
    of("pad", pad((-1, 0, 0), (1, -2, 0)), M, SCALAR, jax=False, label="crop"),
    of("pad", pad((0, -2, 1), (-1, -1, 2)), M, SCALAR, jax=False, label="crop-interior"),
    of("pad", pad((1, 2, 1), (0, 0, 0)), EMPTY, SCALAR, jax=False, label="empty"),
    of("pad", pad(), SCALAR, SCALAR + 1, jax=False, label="scalar"),
    of("slice", lambda x: lax.slice(x, (0, 1), (2, 3)), M, complex=True),
    of("slice", lambda x: lax.slice(x, (0, 1, 0), (2, 2, 4), (1, 2, 3)), T, label="strides"),
    of("slice", lambda x: lax.slice(x, (1, 2), (1, 3), (2, 2)), M, label="to-empty"),
    of("slice", lambda x: lax.slice(x, (0, 0), (0, 2)), EMPTY, label="empty"),
    of("iota", lambda x: lax.mul(x, lax.iota(x.dtype, 3)), V),
    of("bitcast_convert_type", lambda x: lax.mul(x, lax.convert_element_type(bits(x), x.dtype)), V,
       differences=False),  # bits move with every step
    # Copies, names and placements.
    of("name", lambda x: checkpoint_name(lax.sin(x), "here"), V),
    of("optimization_barrier", lambda *x: lax.optimization_barrier(x), V, M),
    of("optimization_barrier", lambda x, n: lax.optimization_barrier((x, n)), V, np.arange(2),
       label="integer"),
    of("device_put", lambda x: jax.device_put(x, here()), V),
    of("sharding_constraint", lambda x: lax.with_sharding_constraint(x, here()), V),
    of("tie", lambda x, y: primitive_named("tie").bind(lax.sin(x), lax.sin(y)), V, V),
    of("copy", lambda x: lax.mul(jax.numpy.array(x, copy=True), x), V),
    # The usual layout. With another one XLA:CPU mixes up the elements of a stack, as in a vmap.
    of("layout_constraint",
       lambda x: with_layout_constraint(jax.numpy.asarray(x), Layout(major_to_minor=(0, 1))), M),
]  # fmt: skip
