"""The option `--transform`: a command works on a transform of its function.

A transform may have more arguments than the function: the cotangents of `vjp`, or the tangents of
`jvp` and `linearize`. They are called seeds here.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

import xform
from xform._jax import tangent_aval
from xform.introspection.callables import argument_names, function_name
from xform.transforms.inspect import FlatArguments

TRANSFORMS = ("grad", "value_and_grad", "vjp", "jvp", "linearize", "remat", "jit")
# The transforms that run a backward pass, which a policy plans.
PLANNED = ("grad", "value_and_grad", "vjp")
# Maps the arguments of a function to the types of its seeds.
Seeds = Callable[[Sequence[Any]], tuple[Any, ...]]


def add_transform(parser: argparse.ArgumentParser) -> None:
    """Add the option `--transform`."""
    parser.add_argument("--transform", choices=TRANSFORMS,
                        help="apply this transform to FUNC first; jit is xform.jit, for a training "
                        "step that it does not decorate")  # fmt: skip


def transformed(name: str, f: Callable[..., Any], args: Sequence[Any], argnums: Any, has_aux: bool,
                policy: Any = None) -> tuple[Callable[..., Any], Seeds]:  # fmt: skip
    """Return a transform of a function, and a function that makes its seeds.

    The transform takes the arguments of the function and then the seeds, all by position.

    Args:
      name: the transform, one of `TRANSFORMS`, except `jit`.
      f: the function.
      args: its arguments, as arrays or types.
      argnums: positions of the arguments that `grad` and `value_and_grad` differentiate; None for
        all.
      has_aux: whether `f` returns a pair `(output, auxiliary)`.
      policy: the policy of its derivative; None is the default.
    """
    n = len(args)
    argnums = tuple(range(n)) if argnums is None else argnums
    no_seeds: Seeds = lambda xs: ()
    tangents: Seeds = lambda xs: tuple(jax.tree.map(_tangent, x) for x in xs)
    match name:
        case "grad":
            call = lambda xs, policy: xform.grad(f, argnums, has_aux, policy=policy)(*xs)
            return _named(name, f, n, call, (), policy), no_seeds
        case "value_and_grad":
            call = lambda xs, policy: xform.value_and_grad(f, argnums, has_aux, policy=policy)(*xs)
            return _named(name, f, n, call, (), policy), no_seeds
        case "vjp":
            pull = lambda xs, policy: xform.vjp(f, *xs, has_aux=has_aux, policy=policy)[1]
            call = lambda xs, policy: pull(xs[:n], policy)(xs[n])
            output = lambda xs: (lambda y: y[0] if has_aux else y)(jax.eval_shape(f, *xs))
            seeds = lambda xs: (jax.tree.map(_tangent, output(xs)),)
            return _named(name, f, n, call, ("cotangents",), policy), seeds
        case "jvp":
            call = lambda xs, policy: xform.jvp(f, xs[:n], xs[n:], has_aux)
        case "linearize":

            def call(xs: Any, policy: Any) -> Any:
                y, push, *_ = xform.linearize(f, *xs[:n], has_aux=has_aux)
                return y, push(*xs[n:])

        case _:
            # By default `remat` saves nothing.
            return _named(
                name, f, n, lambda xs, policy: xform.remat(f, policy=policy)(*xs), (), policy
            ), no_seeds
    more = [f"tangent_{i}" for i in range(n)]
    return _named(name, f, n, call, more, policy), tangents


def arrays_alone(f: Callable[..., Any], args: Sequence[Any]
                 ) -> tuple[Callable[..., Any], list[Any]]:  # fmt: skip
    """Return `f` as a function of only the arrays in `args`, and the types of these arrays.

    The other values in `args` are fixed.
    """
    flat = FlatArguments(args)
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
             for x in map(jax.typeof, flat.arrays())]  # fmt: skip

    def alone(*arrays: Any) -> Any:
        return f(*flat.replace_arrays(arrays)[1])

    alone.__name__ = function_name(f)
    return alone, types


def _named(name: str, f: Any, n: int, call: Callable[[Any, Any], Any], more: Sequence[str],
           policy: Any) -> Callable[..., Any]:  # fmt: skip
    """Return a function that calls `call(arguments, policy)`, with a readable name and signature.

    Its arguments have the names of the arguments of `f`, followed by the names in `more`.
    """

    def run(*xs: Any) -> Any:
        return call(xs, policy)

    kind = inspect.Parameter
    names = [k if k.isidentifier() else f"argument_{i}" for i, k in enumerate(argument_names(f, n))]
    parameters = [kind(k, kind.POSITIONAL_OR_KEYWORD) for k in (*names, *more)]
    run.__name__ = f"{name} of {function_name(f)}"
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _tangent(x: Any) -> Any:
    """Return the type of the tangent of an array or type."""
    aval = tangent_aval(jax.typeof(x))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
