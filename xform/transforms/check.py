"""Raise errors for inputs and outputs that a transform cannot differentiate.

In all functions `caller` is the name of the transform, for the message. `holomorphic` and
`allow_int` are options of the transform: whether the function is complex-differentiable, and
whether integer inputs are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.errors import NotScalar, WrongDtype
from xform.introspection.modules import nnx_object
from xform.program.arithmetic import differentiable
from xform.program.hijax import is_differentiable_hitype
from xform.transforms.function import Tree, as_array


def check_scalar(caller: str, name: str, y: Any) -> None:
    """Raise NotScalar unless `y`, the output of the function `name`, is one scalar."""
    leaves = jax.tree.leaves(y)
    one = len(leaves) == 1 and leaves[0] is y
    if not one or np.shape(y) != ():
        aux = ", or has_aux=True if the first of two outputs is the loss" * (
            isinstance(y, tuple) and len(y) == 2 and caller in _WITH_AUX
        )
        raise NotScalar(
            f"{caller} of {name}: gradient only defined for scalar-output functions",
            f"it returned {f'an array of shape {np.shape(y)}' if one else _types_text(y)}",
            "",
            f"reduce the output to a scalar, or use vjp or jacrev{aux}"
            if caller in _WITH_AUX
            else "pass the loss, which returns a scalar",
        )


# The transforms that have the option `has_aux`.
_WITH_AUX = ("grad", "value_and_grad")
# The most types of leaves in a message.
_LISTED = 4


def _types_text(tree: Tree) -> str:
    """Return the kind of a pytree and the types of its first leaves."""
    leaves = jax.tree.leaves(tree)
    types = [jax.typeof(x).str_short() if hasattr(x, "dtype") else type(x).__name__
             for x in leaves[:_LISTED]]  # fmt: skip
    more = [f"{len(leaves) - _LISTED} more"] if len(leaves) > _LISTED else []
    return f"a {type(tree).__name__} of {', '.join([*types, *more]) or 'nothing'}"


def check_inputs(caller: str, tree: Tree, holomorphic: bool, allow_int: bool) -> None:
    """Raise WrongDtype if a leaf of `tree` cannot be differentiated under these options."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        integer = not differentiable(jax.typeof(as_array(leaf, caller)))
        if integer and not allow_int and (module := nnx_object(tree)) is not None:
            raise WrongDtype(
                f"{caller} of a Flax NNX module, {type(module).__name__}",
                "it holds integers, such as counts of its random keys, which have no gradient",
                "",
                "use xform.flax.grad, or split the module with graphdef, params, rest = "
                "nnx.split(module, nnx.Param, ...) and pass only params",
            )
        if isinstance(tree, tuple) and len(tree) == 1:
            path = path[1:]
        check_input(caller, leaf, holomorphic, allow_int, jax.tree_util.keystr(path))


def check_input(caller: str, x: Any, holomorphic: bool, allow_int: bool, path: str = "") -> None:
    """Raise WrongDtype for an input that cannot be differentiated.

    That is an integer, unless `allow_int`. With `holomorphic` it is any input that is not complex.
    `path` says where in its pytree the input is.
    """
    aval = jax.typeof(as_array(x, caller))
    if is_differentiable_hitype(aval) and not holomorphic:
        return
    dtype = getattr(aval, "dtype", aval.str_short())
    where = f"the input {path}" if path else "an input"
    if holomorphic and not jnp.issubdtype(dtype, np.complexfloating):
        raise WrongDtype(
            f"{caller} with holomorphic=True requires inputs with complex dtype",
            f"{where} has dtype {dtype}",
            "",
            "pass complex inputs, or drop holomorphic",
        )
    if not jnp.issubdtype(dtype, np.inexact) and not allow_int:
        raise WrongDtype(
            f"{caller} requires real- or complex-valued inputs (a sub-dtype of np.inexact)",
            f"{where} has dtype {dtype}",
            "",
            "pass a float, name other arguments in argnums, or set allow_int=True",
        )


def check_forward_input(caller: str, x: Any, holomorphic: bool) -> None:
    """Raise WrongDtype unless the input `x` is real, or complex with `holomorphic`."""
    check_input(caller, x, holomorphic, False)
    dtype = jax.typeof(as_array(x, caller)).dtype
    if not holomorphic and not jnp.issubdtype(dtype, np.floating):
        raise WrongDtype(
            f"{caller} in forward mode requires real-valued inputs",
            f"an input has dtype {dtype}",
            "",
            "set holomorphic=True if the function is complex-differentiable, or use jvp",
        )


def check_output(caller: str, y: Tree, holomorphic: bool) -> None:
    """Raise WrongDtype unless all outputs are real, or complex with `holomorphic`."""
    check_output_types(caller, map(jax.typeof, jax.tree.leaves(y)), holomorphic)


def check_output_types(caller: str, avals: Iterable[Any], holomorphic: bool) -> None:
    """Raise WrongDtype unless all output types are real, or complex with `holomorphic`."""
    for dtype in (aval.dtype for aval in avals):
        if not jnp.issubdtype(dtype, np.complexfloating if holomorphic else np.floating):
            kind = "outputs with complex dtype" if holomorphic else "real-valued outputs"
            raise WrongDtype(
                f"{caller}{' with holomorphic=True' * holomorphic} requires {kind}",
                f"an output has dtype {dtype}",
                "",
                "use vjp, or set holomorphic=True if the function is complex-differentiable",
            )
