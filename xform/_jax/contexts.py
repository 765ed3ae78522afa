"""Contexts in which JAX can make and combine values of given types.

Without `jax_enable_x64`, JAX makes new values in at most 32 bits: a float64 constant becomes a
float32. But a program may have 64-bit values there, if a part of the user's function runs under
`with jax.enable_x64(True):`. JAX does not record this option in an equation's context, so xform
reads it off the types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import jax
import numpy as np

_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def wide(avals: Iterable[Any]) -> bool:
    """Return whether a type has a 64-bit dtype while such dtypes are not enabled."""
    for aval in avals:
        if getattr(aval, "dtype", None) in _WIDE:
            config: Any = jax.config
            return not config.jax_enable_x64
    return False


def has_wide(variables: Iterable[Any]) -> bool:
    """Return `wide` of the types of variables; faster, since it runs for every equation."""
    for v in variables:
        if getattr(v.aval, "dtype", None) in _WIDE:
            config: Any = jax.config
            return not config.jax_enable_x64
    return False


def wide_if_needed(avals: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a context that enables 64-bit dtypes if one of these types has one."""
    return jax.enable_x64(True) if wide(avals) else contextlib.nullcontext()


@contextlib.contextmanager
def joined(
    first: contextlib.AbstractContextManager[Any], second: contextlib.AbstractContextManager[Any]
) -> Generator[None]:
    """Return both contexts, as one."""
    with first, second:
        yield


def also_wide(
    context: contextlib.AbstractContextManager[Any],
) -> contextlib.AbstractContextManager[Any]:
    """Return the context `context`, with 64-bit dtypes enabled."""
    return joined(context, jax.enable_x64(True))


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Return a context without a mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
