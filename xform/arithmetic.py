"""Arithmetic of tangents and cotangents: None is zero, factors are applied one by one."""

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
from xform.hijax import is_vector
from xform.meshes import explicit, on_mesh_of

Value = Any
# As tuples: a union would be made at each question, and these are asked for every operation.
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
    """The values in the places that are `on` (None: all), zeros for those that are None.

    `of` are the variables, or types, whose tangents they are; of a cotangent, `kind` says so.
    """
    places = zip(values, of, itertools.repeat(True) if on is None else on, strict=on is not None)
    return [
        zeros(kind(getattr(v, "aval", v))) if x is None else x for x, v, place in places if place
    ]


def arrayed(x: Value) -> Value:
    """`x` as JAX takes it: a Python number as an array, NumPy's in a dtype that is enabled.

    A literal of a program, NumPy's too, stays as weakly typed as it is.
    """
    if isinstance(x, NUMPY):
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        weak = x.dtype == dtype and getattr(x, "weak_type", False)
        return x if weak else np.asarray(x, dtype)
    return jnp.asarray(x) if isinstance(x, _PYTHON) else x


def all_arrayed(xs: Iterable[Value]) -> list[Value]:
    """Values, each `arrayed`."""
    return [x if isinstance(x, Tracer) else arrayed(x) for x in xs]


def is_number(x: Value) -> bool:
    """Whether a value is a number of Python's; those of NumPy that are floats by class are none."""
    return isinstance(x, float | complex) and not isinstance(x, np.generic)


def cotangent_sharding(x: Value) -> Any:
    """Where the cotangent of `x` lies, as far as the types of explicit axes say it."""
    return cotangent_aval(jax.typeof(x)).sharding


def laid(x: Value, aval: Any, kind: Callable[[Any], Any] = tangent_aval) -> Value:
    """The tangent of a value of type `aval`, or as `kind` says, where it lies if types say it."""
    if not explicit(aval):
        return x
    place = kind(aval).sharding
    return x if jax.typeof(x).sharding.spec == place.spec else jax.sharding.reshard(x, place)


def float0_zeros(shape: tuple[int, ...]) -> Any:
    """The only value of a float0 type."""
    return np.zeros(shape, jax.dtypes.float0)


def constant_like(x: Value, c: float) -> Value:
    """The scalar `c` in the dtype of `x`: a literal, which lax broadcasts for free.

    Of a weakly typed scalar it is a Python number, as weakly typed as `x`; where that would be of
    another dtype, and for arrays, it is none: JAX's own rules do the same.
    """
    weak = getattr(x, "weak_type", is_number(x)) and np.ndim(x) == 0
    if weak and x.dtype == jax.typeof(1.0 * c).dtype:
        return 1.0 * c
    return np.asarray(c, x.dtype)


@dataclasses.dataclass(frozen=True)
class Over:
    """The factor 1 / `divisor`, not formed."""

    divisor: Value


def scale(ct: Value, d: Value) -> Value:
    """`ct` times a partial derivative: 1, -1, an array, an `Over`, or several of these in turn."""
    if isinstance(d, tuple):
        return functools.reduce(scale, d, ct)
    if isinstance(d, Over):
        return lax.div(ct, d.divisor)
    if isinstance(d, int):
        return ct if d == 1 else lax.neg(ct)
    return lax.mul(ct, d)


def add(terms: Sequence[Value]) -> Value:
    """The sum, as their dtype means it: that of another library may have an addition of its own."""
    return terms[0] if len(terms) == 1 else functools.reduce(_plus, terms)


def _plus(a: Value, b: Value) -> Value:
    """On the mesh of their own: a sum of cotangents belongs to no equation, which would say it."""
    avals = jax.typeof(a), jax.typeof(b)
    own = not isinstance(getattr(avals[0], "dtype", None), np.dtype)
    with on_mesh_of(*avals):
        return ad.add_jaxvals(a, b) if own else lax.add(a, b)


def like(dx: Value, y: Value) -> Value:
    """`dx` in the shape of `y`, and where it lies: elementwise operands may differ in both."""
    full = dx if dx.shape == y.shape else lax.broadcast_in_dim(dx, y.shape, kept(dx, y))
    return laid(full, jax.typeof(y))


def kept(x: Value, y: Value) -> tuple[int, ...]:
    return tuple(range(y.ndim)) if x.ndim == y.ndim else ()


def common_dtype(dtypes: Iterable[Any]) -> Any:
    """The dtype that holds what others do, also where JAX promotes none by itself."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def reduce_like(ct: Value, x: Value) -> Value:
    """Transpose of what an elementwise primitive does to an operand: it lets it meet another.

    A scalar is broadcast, and of explicit axes the other may lie along more.
    """
    aval = jax.typeof(x)
    if ct.shape != aval.shape:
        ct = _summed(ct, aval.shape)
    return laid(ct, aval, cotangent_aval)


def _summed(ct: Value, shape: tuple[int, ...]) -> Value:
    if len(shape) != ct.ndim:
        return lax.reduce_sum(ct, tuple(range(ct.ndim)))
    axes = tuple(i for i, (a, b) in enumerate(zip(ct.shape, shape, strict=True)) if a != b)
    return lax.reshape(lax.reduce_sum(ct, axes), shape)
