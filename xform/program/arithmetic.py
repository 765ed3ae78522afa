"""Arithmetic of tangents and cotangents. None is a symbolic zero."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._jax import (
    ShapedArray,
    Tracer,
    ad,
    cotangent_aval,
    is_reference,
    tangent_aval,
    zeros,
)
from xform._jax.meshes import explicit, on_mesh_of
from xform.program.hijax import is_vector

Value = Any
# Tuples, not unions: `isinstance` is called for every operation, and would build a union each time.
NUMPY = np.ndarray, np.generic
_PYTHON = bool, int, float, complex


def differentiable(aval: Any) -> bool:
    """Whether a value of this type has tangents other than float0."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return is_vector(aval)
    return _inexact(dtype) and not is_reference(aval)


@functools.lru_cache(maxsize=256)
def _inexact(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return tangent_aval(ShapedArray((), dtype)).dtype != jax.dtypes.float0
    return jnp.issubdtype(dtype, np.inexact)


def instantiate(values: Sequence[Value], of: Iterable[Any], on: Iterable[bool] | None = None,
                kind: Callable[[Any], Any] = tangent_aval) -> list[Value]:  # fmt: skip
    """The values at the positions where `on` is True (None: all), with zeros in place of None.

    `of` holds the primals, as variables or types. `kind` maps the type of a primal to the type of
    its zeros: `tangent_aval` or `cotangent_aval`.
    """
    triples = zip(values, of, itertools.repeat(True) if on is None else on, strict=on is not None)
    return [
        zeros(kind(getattr(v, "aval", v))) if x is None else x for x, v, keep in triples if keep
    ]


def as_jax_value(x: Value) -> Value:
    """`x` as JAX converts it: a Python number to an array, a NumPy value to an enabled dtype.

    A literal of a program keeps its weak type, also if it is a NumPy value.
    """
    if isinstance(x, NUMPY):
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        weak = x.dtype == dtype and getattr(x, "weak_type", False)
        return x if weak else np.asarray(x, dtype)
    return jnp.asarray(x) if isinstance(x, _PYTHON) else x


def as_jax_values(xs: Iterable[Value]) -> list[Value]:
    """Apply `as_jax_value` to each value that is not a tracer."""
    return [x if isinstance(x, Tracer) else as_jax_value(x) for x in xs]


def is_number(x: Value) -> bool:
    """Whether a value is a Python float or complex. `np.float64`, a subclass of float, is not."""
    return isinstance(x, float | complex) and not isinstance(x, np.generic)


def cotangent_sharding(x: Value) -> Any:
    """The sharding of the cotangent of `x`, along the explicit axes of the mesh."""
    return cotangent_aval(jax.typeof(x)).sharding


def reshard_tangent(x: Value, aval: Any, kind: Callable[[Any], Any] = tangent_aval) -> Value:
    """Reshard a tangent `x` of a value of type `aval`, if the type has explicit mesh axes.

    `kind` is `tangent_aval`, or `cotangent_aval` if `x` is a cotangent.
    """
    if not explicit(aval):
        return x
    sharding = kind(aval).sharding
    same = jax.typeof(x).sharding.spec == sharding.spec
    return x if same else jax.sharding.reshard(x, sharding)


def float0_zeros(shape: tuple[int, ...]) -> Any:
    """The only value of a float0 type of this shape."""
    return np.zeros(shape, jax.dtypes.float0)


def constant_like(x: Value, c: float) -> Value:
    """The scalar `c` in the dtype of `x`: a literal, which lax broadcasts for free.

    If `x` is a weakly typed scalar, the result is a Python number, which is weakly typed too. If
    that would have another dtype, or if `x` is an array, the result is a NumPy scalar. JAX's own
    rules do the same.
    """
    weak = getattr(x, "weak_type", is_number(x)) and np.ndim(x) == 0
    if weak and x.dtype == jax.typeof(1.0 * c).dtype:
        return 1.0 * c
    return np.asarray(c, x.dtype)


@dataclasses.dataclass(frozen=True)
class Over:
    """The factor 1 / `divisor`, applied as a division."""

    divisor: Value


def scale(ct: Value, d: Value) -> Value:
    """`ct` times a partial derivative: 1, -1, an array, an `Over`, or a tuple of these.

    The factors of a tuple are applied one by one.
    """
    if isinstance(d, tuple):
        return functools.reduce(scale, d, ct)
    if isinstance(d, Over):
        return lax.div(ct, d.divisor)
    if isinstance(d, int):
        return ct if d == 1 else lax.neg(ct)
    return lax.mul(ct, d)


def add(terms: Sequence[Value]) -> Value:
    """The sum of the terms. A dtype of another library may define its own addition."""
    return terms[0] if len(terms) == 1 else functools.reduce(_plus, terms)


def _plus(a: Value, b: Value) -> Value:
    """Add on the mesh of the operands: a sum of cotangents has no equation that sets the mesh."""
    avals = jax.typeof(a), jax.typeof(b)
    foreign = not isinstance(getattr(avals[0], "dtype", None), np.dtype)
    with on_mesh_of(*avals):
        return ad.add_jaxvals(a, b) if foreign else lax.add(a, b)


def shaped_like(dx: Value, y: Value) -> Value:
    """`dx` in the shape and sharding of `y`, which may differ from those of an operand."""
    full = dx if dx.shape == y.shape else lax.broadcast_in_dim(dx, y.shape, kept_dimensions(dx, y))
    return reshard_tangent(full, jax.typeof(y))


def kept_dimensions(x: Value, y: Value) -> tuple[int, ...]:
    """The `broadcast_dimensions` from `x` to `y`: all axes of `y`; none if `x` is a scalar."""
    return tuple(range(y.ndim)) if x.ndim == y.ndim else ()


def common_dtype(dtypes: Iterable[Any]) -> Any:
    """The dtype that all dtypes promote to, also under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def reduce_like(ct: Value, x: Value) -> Value:
    """Sum and reshard a cotangent to the shape and sharding of the operand `x`.

    This transposes what an elementwise primitive does to an operand: it broadcasts a scalar, and
    shards the operand along the explicit axes of the other operand.
    """
    aval = jax.typeof(x)
    if ct.shape != aval.shape:
        ct = _summed(ct, aval.shape)
    return reshard_tangent(ct, aval, cotangent_aval)


def _summed(ct: Value, shape: tuple[int, ...]) -> Value:
    if len(shape) != ct.ndim:
        return lax.reduce_sum(ct, tuple(range(ct.ndim)))
    axes = tuple(i for i, (a, b) in enumerate(zip(ct.shape, shape, strict=True)) if a != b)
    return lax.reshape(lax.reduce_sum(ct, axes), shape)
