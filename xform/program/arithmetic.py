"""Arithmetic of tangents and cotangents: sums, products, zeros, broadcasts and reductions.

A value is an array, a tracer or a Python number. None is a symbolic zero. A *partial derivative* is
the factor by which the derivative of an elementwise operation multiplies a tangent or cotangent;
`scale` lists its forms. Many functions also set the sharding, because JAX checks it in programs
over meshes with explicit axes.
"""

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

from xform._jax import ShapedArray, Tracer, ad, cotangent_aval, is_reference, tangent_aval
from xform._jax.meshes import has_explicit_axis
from xform._jax.symbolic import is_symbolic
from xform.program.arrays import context_for, resharded, zeros
from xform.program.hijax import is_differentiable_hitype

Value = Any
# Tuples, not unions: `isinstance` is called for every operation, and would build a union each time.
NUMPY = np.ndarray, np.generic
_PYTHON = bool, int, float, complex


def is_key(x: Any) -> bool:
    """Return whether a value, or a type of values, is of random keys."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def differentiable(aval: Any) -> bool:
    """Return whether a value of this type has tangents other than float0."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return is_differentiable_hitype(aval)
    return _inexact(dtype) and not is_reference(aval)


@functools.lru_cache(maxsize=256)
def _inexact(dtype: Any) -> bool:
    """Return whether values of a dtype have tangents. Some dtypes that only JAX has do."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return tangent_aval(ShapedArray((), dtype)).dtype != jax.dtypes.float0
    return jnp.issubdtype(dtype, np.inexact)


def instantiate(values: Sequence[Value], primals: Iterable[Any], mask: Iterable[bool] | None = None,
                kind: Callable[[Any], Any] = tangent_aval) -> list[Value]:  # fmt: skip
    """Return the tangents (or cotangents) `values`, with arrays of zeros in place of None.

    `primals` are variables or types. Only the values at which `mask` is True are returned; None:
    all values. `kind` maps the type of a primal to the type of its zeros: `tangent_aval` or
    `cotangent_aval`.
    """
    every = itertools.repeat(True)
    triples = zip(values, primals, every if mask is None else mask, strict=mask is not None)
    return [zeros(kind(getattr(v, "aval", v))) if x is None else x for x, v, on in triples if on]


def as_jax_value(x: Value) -> Value:
    """Convert a Python number to a JAX array, and a NumPy value to a dtype that JAX has enabled.

    For example, float64 becomes float32 without `jax_enable_x64`. A literal of a jaxpr may be a
    NumPy value with a weak type, and is returned unchanged if its dtype is enabled.
    """
    if isinstance(x, NUMPY):
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        weak = x.dtype == dtype and getattr(x, "weak_type", False)
        return x if weak else np.asarray(x, dtype)
    return jnp.asarray(x) if isinstance(x, _PYTHON) else x


def as_jax_values(xs: Iterable[Value]) -> list[Value]:
    """Convert all values by `as_jax_value`, except tracers."""
    return [x if isinstance(x, Tracer) else as_jax_value(x) for x in xs]


def is_number(x: Value) -> bool:
    """Return whether a value is a Python float or complex; False for `np.float64`."""
    return isinstance(x, float | complex) and not isinstance(x, np.generic)


def cotangent_sharding(x: Value) -> Any:
    """Return the sharding of the cotangent of `x`, along the explicit axes of the mesh."""
    return cotangent_aval(jax.typeof(x)).sharding


def reshard_tangent(x: Value, aval: Any, kind: Callable[[Any], Any] = tangent_aval) -> Value:
    """Reshard a tangent `x` of a value of type `aval`, if the type has explicit mesh axes.

    `kind` is `tangent_aval`, or `cotangent_aval` if `x` is a cotangent.
    """
    if not has_explicit_axis(aval):
        return x
    return resharded(x, kind(aval))


def float0_zeros(shape: tuple[int, ...]) -> Any:
    """Return the tangent of an integer or boolean array of this shape: its dtype is float0."""
    if any(map(is_symbolic, shape)):  # NumPy has no such shape
        return lax.broadcast(np.zeros((), jax.dtypes.float0), shape)
    return np.zeros(shape, jax.dtypes.float0)


def constant_like(x: Value, c: float) -> Value:
    """Return the scalar `c` in the dtype of `x`.

    In a jaxpr it is a literal, which lax broadcasts for free.
    If `x` is a weakly typed scalar of JAX's default dtype for `c`, the result is a Python number,
    which is weakly typed too. Else it is a NumPy scalar. JAX's own rules do the same.
    """
    weak = getattr(x, "weak_type", is_number(x)) and np.ndim(x) == 0
    if weak and x.dtype == jax.typeof(1.0 * c).dtype:
        return 1.0 * c
    return np.asarray(c, x.dtype)


@dataclasses.dataclass(frozen=True)
class DivideBy:
    """The partial derivative 1 / `divisor`. It is applied as a division."""

    divisor: Value


def scale(ct: Value, d: Value) -> Value:
    """Return `ct` times a partial derivative: 1, -1, an array, a `DivideBy`, or a tuple of these.

    The factors of a tuple are applied one by one. A factor is converted to the dtype of `ct`, which
    differs if a custom rule returned a cotangent of another dtype.
    """
    if isinstance(d, tuple):
        return functools.reduce(scale, d, ct)
    if isinstance(d, int):
        return ct if d == 1 else lax.neg(ct)
    apply, factor = (lax.div, d.divisor) if isinstance(d, DivideBy) else (lax.mul, d)
    if not is_number(factor) and factor.dtype != ct.dtype:
        factor = lax.convert_element_type(factor, ct.dtype)
    return apply(ct, factor)


def add(terms: Sequence[Value]) -> Value:
    """Return the sum of one or more terms, arrays or values of types with their own addition."""
    return terms[0] if len(terms) == 1 else functools.reduce(_add_two, terms)


def _add_two(a: Value, b: Value) -> Value:
    """Add two values in the context of their types.

    It is set here, because a sum of cotangents belongs to no equation that would set it.
    """
    avals = jax.typeof(a), jax.typeof(b)
    own_addition = not isinstance(getattr(avals[0], "dtype", None), np.dtype)
    with context_for(*avals):
        return ad.add_jaxvals(a, b) if own_addition else lax.add(a, b)


def shaped_like(dx: Value, y: Value) -> Value:
    """Broadcast and reshard a tangent `dx` to the shape and sharding of the output `y`.

    `dx` has the shape of an operand of an elementwise primitive, which may be a scalar or have axes
    of size 1.
    """
    shape = np.shape(dx)  # a literal is a number without a shape
    axes = tuple(range(y.ndim)) if len(shape) == y.ndim else ()
    full = dx if shape == y.shape else lax.broadcast_in_dim(dx, y.shape, axes)
    return reshard_tangent(full, jax.typeof(y))


def reduce_like(ct: Value, x: Value) -> Value:
    """Sum and reshard a cotangent to the shape and sharding of the operand `x`.

    An elementwise primitive broadcasts an operand, and shards it along the explicit axes of the
    other operand. This function is the transpose of both.
    """
    aval = jax.typeof(x)
    if ct.shape != aval.shape:
        ct = _sum_to_shape(ct, aval.shape)
    return reshard_tangent(ct, aval, cotangent_aval)


def _sum_to_shape(ct: Value, shape: tuple[int, ...]) -> Value:
    """Sum over all axes for a scalar shape, else over the axes that were broadcast from size 1."""
    if len(shape) != ct.ndim:
        return lax.reduce_sum(ct, tuple(range(ct.ndim)))
    pairs = enumerate(zip(ct.shape, shape, strict=True))
    axes = tuple(i for i, (a, b) in pairs if b == 1 and a != 1)
    return lax.reshape(lax.reduce_sum(ct, axes), shape)
