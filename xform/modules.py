"""Arguments that are no arrays, or have parts that are none: what is held as it is.

Of Equinox's modules every transform holds what is no array: activation functions, strings and flags
are leaves of a module, and Equinox's own filtered transforms mean it so. Anywhere else in what is
differentiated they are the mistakes that they look like; what is only compiled holds them too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xform.errors import WrongArgument
from xform.loaded import names_of

Tree = Any


def inexact(x: Any) -> bool:
    """Whether a leaf of a module is differentiated: JAX's arrays of floats or complex numbers."""
    return isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, np.inexact)


def shaped(x: Any) -> bool:
    """Whether a leaf may be an input of a traced function: arrays, and their types."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def opened(f: Callable[..., Any], args: Sequence[Tree], inputs: Callable[[Any], bool]
           ) -> tuple[Callable[..., Any], tuple[Tree, ...]]:  # fmt: skip
    """`f` and its arguments, in whose modules None stands for what is not among the `inputs`.

    The function that is returned puts it back. Where there is nothing to hold, the arguments are as
    they were, and so is `f`.
    """
    if _module_type() is None:
        return f, tuple(args)
    leaves, tree = jax.tree.flatten(tuple(args), is_leaf=_is_module)
    pairs = [_parted(x, inputs) if _is_module(x) else (x, None) for x in leaves]
    if not jax.tree.leaves([rest for _, rest in pairs]):
        return f, tuple(args)

    @functools.wraps(f, updated=())
    def whole(*args: Tree, **kwargs: Any) -> Any:
        values = tree.flatten_up_to(args)
        pairs_now = zip(values, pairs, strict=True)
        return f(*tree.unflatten([_joined(x, rest) for x, (_, rest) in pairs_now]), **kwargs)

    return whole, tree.unflatten([part for part, _ in pairs])


def compilable(f: Callable[..., Any], args: Sequence[Tree], kwargs: Mapping[str, Tree]
               ) -> tuple[Callable[..., Any], Sequence[Tree], Mapping[str, Tree]]:  # fmt: skip
    """`f` and its arguments as `jax.jit` takes them: of modules the arrays, in outputs too.

    Raises:
      WrongArgument: `equinox.filter_jit` made `f`, to donate arguments.
    """
    if _module_type() is None:
        return f, args, kwargs
    if _is_module(f) and (getattr(f, "donate_first", False) or getattr(f, "donate_rest", False)):
        raise WrongArgument(
            "memory of a function that equinox.filter_jit made",
            "it donates arguments, and does not say which arrays to others",
            "",
            "pass the function that is not jitted, with donate_argnums",
        )
    call = lambda args, kwargs: f(*args, **kwargs)
    whole, (args, kwargs) = opened(call, (tuple(args), dict(kwargs)), shaped)

    @functools.wraps(f, updated=())
    def run(*args: Tree, **kwargs: Tree) -> Tree:
        part = lambda x: _parted(x, shaped)[0] if _is_module(x) else x
        return jax.tree.map(part, whole(args, kwargs), is_leaf=_is_module)

    return run, args, kwargs


def holding(f: Callable[..., Any], args: Sequence[Tree], kwargs: Mapping[str, Tree]
            ) -> tuple[Callable[..., Any], Sequence[Tree], Mapping[str, Tree]]:  # fmt: skip
    """`f` and its arguments, in which None stands for leaves that JAX takes for no array.

    The function that is returned puts them back: strings, configurations, functions. Where there is
    nothing to hold, all is as it was.
    """
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    held = [_opaque(x) for x in leaves]
    if not any(held):
        return f, args, kwargs

    @functools.wraps(f, updated=())
    def whole(*args: Tree, **kwargs: Tree) -> Tree:
        rest = iter(jax.tree.leaves((args, kwargs)))
        full = [x if h else next(rest) for x, h in zip(leaves, held, strict=True)]
        args, kwargs = tree.unflatten(full)
        return f(*args, **kwargs)

    args, kwargs = tree.unflatten([None if h else x for x, h in zip(leaves, held, strict=True)])
    return whole, args, kwargs


def _opaque(x: Any) -> bool:
    """Whether JAX takes something for no array, nor for a type of one."""
    if shaped(x):
        return False
    try:
        jax.typeof(x)
    except TypeError:
        return not hasattr(x, "__jax_array__")
    return False


def _module_type() -> Any:
    """The class of Equinox's modules; None where Equinox is not loaded."""
    return names_of(sys.modules.get("equinox")).get("Module")


def nnx_module(tree: Tree) -> Any:
    """The first module of Flax NNX in a tree, or None."""
    kind = names_of(sys.modules.get("flax.nnx")).get("Module")
    if kind is None:
        return None
    is_one = lambda x: isinstance(x, kind)
    return next(filter(is_one, jax.tree.leaves(tree, is_leaf=is_one)), None)


def _is_module(x: Any) -> bool:
    return isinstance(x, _module_type())


def _parted(module: Tree, inputs: Callable[[Any], bool]) -> tuple[Tree, Tree]:
    """The inputs of a module, and the rest, each with None in the place of the other."""
    leaves, tree = jax.tree.flatten(module)
    pairs = [(x, None) if inputs(x) else (None, x) for x in leaves]
    return tree.unflatten([a for a, _ in pairs]), tree.unflatten([b for _, b in pairs])


def _joined(part: Tree, rest: Tree) -> Tree:
    either = lambda a, b: b if a is None else a
    return jax.tree.map(either, part, rest, is_leaf=lambda x: x is None)
