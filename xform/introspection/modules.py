"""Take static leaves, which are not arrays and not traced, out of arguments.

Activation functions, strings and flags are leaves of an Equinox module. Every transform passes them
to the function unchanged, like Equinox's own filtered transforms. Outside of modules, such leaves
are errors in differentiated arguments. If a function is only compiled and not differentiated, its
arguments may have such leaves anywhere.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xform.errors import WrongArgument
from xform.introspection.loaded import names_of

Tree = Any


def is_inexact_array(x: Any) -> bool:
    """Return whether a leaf of a module is differentiated: a float or complex JAX array."""
    return isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, np.inexact)


def is_array_or_type(x: Any) -> bool:
    """Return whether a leaf can be an input of a traced function: an array or the type of one."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def take_static_out_of_modules(
    f: Callable[..., Any], args: Sequence[Tree], inputs: Callable[[Any], bool]
) -> tuple[Callable[..., Any], tuple[Tree, ...]]:
    """Take the static leaves out of the Equinox modules in `args`.

    Args:
      f: a function.
      args: its arguments.
      inputs: returns whether a leaf of a module is an input; all other leaves are static.

    Returns:
      `f` with the static leaves put back into the modules of its arguments, and the arguments with
      None in place of these leaves. Without static leaves, `f` and `args` are returned unchanged.
    """
    if _module_type() is None:
        return f, tuple(args)
    is_leaf = lambda x: _is_module(x) or is_nnx_object(x)
    leaves, tree = jax.tree.flatten(tuple(args), is_leaf=is_leaf)
    pairs = [_partition(x, inputs) if _is_module(x) else (x, None) for x in leaves]
    if not jax.tree.leaves([static for _, static in pairs]):
        return f, tuple(args)

    @functools.wraps(f, updated=())
    def with_static(*args: Tree, **kwargs: Any) -> Any:
        values = zip(tree.flatten_up_to(args), pairs, strict=True)
        return f(*tree.unflatten([_combine(x, static) for x, (_, static) in values]), **kwargs)

    return with_static, tree.unflatten([dynamic for dynamic, _ in pairs])


def arguments_for_jit(
    f: Callable[..., Any], args: Sequence[Tree], kwargs: Mapping[str, Tree]
) -> tuple[Callable[..., Any], Sequence[Tree], Mapping[str, Tree]]:
    """Return `f`, its arguments and its keyword arguments in a form that `jax.jit` accepts.

    The static leaves of Equinox modules are taken out. Modules in the outputs keep only their
    arrays.

    Raises:
      WrongArgument: `f` is an `equinox.filter_jit` that donates arguments.
    """
    if _module_type() is None:
        return f, args, kwargs
    if _is_module(f) and (getattr(f, "donate_first", False) or getattr(f, "donate_rest", False)):
        raise WrongArgument(
            "memory of a function returned by equinox.filter_jit",
            "it donates arguments, but which arrays it donates cannot be read from outside",
            "",
            "pass the function without equinox.filter_jit, and donate_argnums",
        )
    call = lambda args, kwargs: f(*args, **kwargs)
    with_static, (args, kwargs) = take_static_out_of_modules(
        call, (tuple(args), dict(kwargs)), is_array_or_type
    )

    @functools.wraps(f, updated=())
    def run(*args: Tree, **kwargs: Tree) -> Tree:
        arrays = lambda x: _partition(x, is_array_or_type)[0] if _is_module(x) else x
        return jax.tree.map(arrays, with_static(args, kwargs), is_leaf=_is_module)

    return run, args, kwargs


def take_static_out(
    f: Callable[..., Any], args: Sequence[Tree], kwargs: Mapping[str, Tree]
) -> tuple[Callable[..., Any], Sequence[Tree], Mapping[str, Tree]]:
    """Take the static leaves, such as strings, configurations and functions, out of all arguments.

    Returns `f` with these leaves put back into its arguments, and the arguments with None in their
    place. Without static leaves, everything is returned unchanged.
    """
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=is_nnx_object)
    static = [_is_static(x) for x in leaves]
    if not any(static):
        return f, args, kwargs

    @functools.wraps(f, updated=())
    def with_static(*args: Tree, **kwargs: Tree) -> Tree:
        dynamic = iter(jax.tree.leaves((args, kwargs), is_leaf=is_nnx_object))
        pairs = zip(leaves, static, strict=True)
        args, kwargs = tree.unflatten([x if is_static else next(dynamic) for x, is_static in pairs])
        return f(*args, **kwargs)

    dynamic = [None if is_static else x for x, is_static in zip(leaves, static, strict=True)]
    args, kwargs = tree.unflatten(dynamic)
    return with_static, args, kwargs


def _is_static(x: Any) -> bool:
    """Return whether JAX does not accept a leaf as an array or as the type of one."""
    if is_array_or_type(x) or is_nnx_object(x):
        return False
    try:
        jax.typeof(x)
    except TypeError:
        return not hasattr(x, "__jax_array__")
    return False


def _module_type() -> Any:
    """Return `equinox.Module`; None if Equinox is not loaded."""
    return names_of(sys.modules.get("equinox")).get("Module")


def nnx_object(tree: Tree) -> Any:
    """Return the first module, optimizer or other object of Flax NNX in a tree, or None.

    A function may change such an object, and NNX's transforms bring the changes to the caller.
    """
    return next(filter(is_nnx_object, jax.tree.leaves(tree, is_leaf=is_nnx_object)), None)


def is_nnx_object(x: Any) -> bool:
    """Return whether a value is an object of Flax NNX that a function may change."""
    kind = names_of(sys.modules.get("flax.nnx")).get("Pytree")
    return kind is not None and isinstance(x, kind)


def _is_module(x: Any) -> bool:
    """Return whether a value is an Equinox module. Equinox must be loaded."""
    return isinstance(x, _module_type())


def _partition(module: Tree, inputs: Callable[[Any], bool]) -> tuple[Tree, Tree]:
    """Split a module into inputs and static leaves: two trees, with None for the other part."""
    leaves, tree = jax.tree.flatten(module)
    pairs = [(x, None) if inputs(x) else (None, x) for x in leaves]
    inputs_only, static_only = zip(*pairs, strict=True) if pairs else ((), ())
    return tree.unflatten(inputs_only), tree.unflatten(static_only)


def _combine(dynamic: Tree, static: Tree) -> Tree:
    """Merge inputs and static leaves into a module again: the inverse of `_partition`."""
    first_given = lambda a, b: b if a is None else a
    return jax.tree.map(first_given, dynamic, static, is_leaf=lambda x: x is None)
