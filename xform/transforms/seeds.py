"""Seeds: the tangents and cotangents with which a derivative is called, by a user or by xform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import cotangent_aval, tangent_aval
from xform._jax.meshes import explicit_mesh_of
from xform.errors import WrongCotangent, WrongTangent
from xform.program.arithmetic import Value, differentiable, is_number
from xform.program.arrays import filled, placed, varying
from xform.program.hijax import is_differentiable_hitype
from xform.transforms.function import Tree, as_array


def pull_ones(pull: Callable[[Tree], Any], y: Tree) -> Any:
    """Return the result of a pullback for cotangents of ones. `y` is the output of its function."""
    with explicit_mesh_of(y):
        return pull(jax.tree.map(lambda y: filled(cotangent_aval(jax.typeof(y)), 1), y))


def check_cotangent(ct: Value, aval: Any, name: str) -> Value:
    """Return a cotangent of an output of type `aval` as an array.

    Raise WrongCotangent if shape or dtype do not match; the message has the function's `name`.
    """
    ct_aval = jax.typeof(ct)
    vector = is_differentiable_hitype(aval)
    integer = not vector and not jnp.issubdtype(aval.dtype, np.inexact)
    if vector:
        same = ct_aval == cotangent_aval(aval)
    else:
        same = ct_aval.shape == aval.shape and (ct_aval.dtype == aval.dtype or integer)
    if not same:
        raise WrongCotangent(
            f"pullback of {name}",
            f"a cotangent is {ct_aval.str_short()}, the output it belongs to {aval.str_short()}",
            "",
            "pass a cotangent of the output's shape and dtype",
        )
    if axes := _more_axes(ct_aval, aval):
        raise WrongCotangent(
            f"pullback of {name}",
            f"a cotangent varies over {axes} within a shard_map, but its output is the same there",
            "",
            f"sum the cotangent over these axes, by `jax.lax.psum(ct, {axes})`; or let the output "
            f"vary, by applying `jax.lax.pcast(..., {axes}, to='varying')` to it",
        )
    # As in JAX, the backward function of a custom_vjp gets a Python number unchanged.
    if vector or integer or (is_number(ct) and not varying(aval)):
        return ct
    return placed(as_array(ct, f"pullback of {name}"), cotangent_aval(aval))


def _more_axes(x_aval: Any, aval: Any) -> tuple[Any, ...]:
    """Return the `shard_map` axes over which values of the first type vary and of the second not.

    A cotangent of a value that is reduced over an axis is a partial sum there: it varies.
    """
    reduced = getattr(getattr(aval, "mat", None), "reduced", frozenset())
    return tuple(sorted(varying(x_aval) - varying(aval) - reduced, key=str))


def _check_varying(dx_aval: Any, aval: Any, caller: str, name: str) -> None:
    """Raise WrongTangent if a tangent varies over devices and its primal does not."""
    if axes := _more_axes(dx_aval, aval):
        raise WrongTangent(
            f"{caller} of {name}",
            f"a tangent varies over {axes} within a shard_map, but its primal is the same there",
            "",
            f"let the primal vary, by applying `jax.lax.pcast(..., {axes}, to='varying')` to the "
            f"primal value passed to `xform.{caller}`",
        )


def check_tangents(
    name: str, tree: Any, avals: Sequence[Any], caller: str, tangents: tuple[Tree, ...]
) -> list[Value]:
    """Return tangents as a flat list, with None for integers.

    Args:
      name: the name of the function, for messages.
      tree: the tree of its primals.
      avals: the types of the leaves of that tree.
      caller: the transform, for messages.
      tangents: one tree for each primal.

    Raises:
      WrongTangent: the tangents do not match the primals in tree, shape or dtype, or vary over a
        `shard_map` axis over which the primal does not.
    """
    leaves, tangent_tree = jax.tree.flatten(tangents)
    if tangent_tree != tree:
        raise WrongTangent(
            f"{caller} of {name}",
            f"the tangents' tree is {tangent_tree}, the primals' is {tree}",
            "",
            "pass tangents with the tree of the primals",
        )
    out: list[Value] = []
    for x, aval in zip(leaves, avals, strict=True):
        dx_aval, active = jax.typeof(x), differentiable(aval)
        if is_differentiable_hitype(aval):
            same = dx_aval == tangent_aval(aval)
        else:
            plain = active and isinstance(aval.dtype, np.dtype)
            wanted = aval.dtype if plain else tangent_aval(aval).dtype
            same = dx_aval.dtype == wanted and dx_aval.shape == aval.shape
        if not same:
            raise WrongTangent(
                f"{caller} of {name}",
                f"a tangent is {dx_aval.str_short()}, but its primal {aval.str_short()} needs "
                f"{tangent_aval(aval).str_short()}",
                "",
                "pass tangents of the primals' shapes and dtypes; for integers, "
                "np.zeros(shape, jax.dtypes.float0)",
            )
        _check_varying(dx_aval, aval, caller, name)
        number = is_number(x) and not varying(aval)
        unchanged = number or not active or is_differentiable_hitype(aval)
        dx = x if unchanged else placed(as_array(x, caller), tangent_aval(aval))
        out.append(dx if active else None)
    return out
