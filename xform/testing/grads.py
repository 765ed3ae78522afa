"""`check_grads`: compare derivatives of a function with finite differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import xform
from xform.errors import WrongArgument
from xform.introspection.callables import check_callable, function_name
from xform.testing.comparisons import CaseChecker, Fun, differences, direction, dot
from xform.testing.validate import check_names, check_outputs, check_point, check_precision
from xform.transforms.function import as_tuple

# The remedy in the error for a function whose derivatives disagree.
_REMEDY = (
    "correct the formula of a custom rule that it calls; or choose a point without a kink nearby, "
    "and compute in 64 bits throughout"
)


def check_grads(f: Fun, args: Sequence[Any], order: int = 2, modes: Sequence[str] = ("jvp", "vjp"),
                tolerance: float = 1e-5) -> None:  # fmt: skip
    """Compare all derivatives of `f` up to an order with central differences.

    Args:
      f: function of pytrees of arrays.
      args: the point, a tuple or list of arguments in float64 (`jax.enable_x64`), because
        differences of float32 numbers are too inexact.
      order: how many times to differentiate.
      modes: "jvp", "vjp", or both. With both, all compositions of the two are checked.
      tolerance: the allowed difference, relative to the largest element, and absolute if that is
        below 1.

    Raises:
      WrongRule: a derivative is wrong; the message names the mode and the order.
      WrongArgument: there is nothing to check (no point, no order or no mode), or the point or the
        output of `f` is not in 64 bits.

    >>> with jax.enable_x64(True):
    ...     check_grads(lambda x: jnp.sin(x) * x, [jnp.array([0.3, 1.0])])
    """
    check_callable(f, "check_grads")
    point = as_tuple(args, "args", "check_grads")
    check_names("check_grads", "modes", modes, ("jvp", "vjp"))
    if order < 1:
        raise WrongArgument(
            f"check_grads with order={order}",
            "the order of a derivative is at least 1",
            "",
            "give 1 or more",
        )
    check_point("check_grads", point)
    point = jax.tree.map(jnp.asarray, point)
    check_precision("check_grads", "an argument", point)
    outputs = jax.eval_shape(f, *point)
    check_outputs("check_grads", outputs)
    check_precision("check_grads", "an output", outputs)
    _check_grads(function_name(f), f, point, order, modes, tolerance)


def _check_grads(name: str, f: Fun, args: tuple[Any, ...], order: int, modes: Sequence[str],
                 tolerance: float) -> None:  # fmt: skip
    """Check the derivatives of `f`, and recursively the derivatives of its derivatives."""
    dxs = direction(args, order)
    slope = differences(f, args, dxs)
    checker = CaseChecker(name, f"order {order}", tolerance, _REMEDY)
    for mode in modes:
        if mode == "jvp":
            derivative = lambda *xs: xform.jvp(f, xs, dxs)[1]
            checker.close("jvp against differences", derivative(*args), slope)
        else:
            ct = direction(jax.eval_shape(f, *args), order)
            derivative = lambda *xs: xform.vjp(f, *xs)[1](ct)  # noqa: B023
            checker.close("vjp against differences", dot(derivative(*args), dxs), dot(ct, slope))
        if order > 1:
            _check_grads(name, derivative, args, order - 1, modes, tolerance)
