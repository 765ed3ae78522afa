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
        raise NotScalar(
            f"{caller} of {name}: gradient only defined for scalar-output functions",
            f"it returned {f'an array of shape {np.shape(y)}' if one else repr(y)}",
            "",
            "reduce the output to a scalar, or use vjp or jacrev",
        )


def check_inputs(caller: str, tree: Tree, holomorphic: bool, allow_int: bool) -> None:
    """Raise WrongDtype if a leaf of `tree` cannot be differentiated under these options."""
    for leaf in jax.tree.leaves(tree):
        integer = not differentiable(jax.typeof(as_array(leaf, caller)))
        if integer and not allow_int and (module := nnx_object(tree)) is not None:
            raise WrongDtype(
                f"{caller} of a Flax NNX module, {type(module).__name__}",
                "it holds integers, such as counts of its random keys, which have no gradient",
                "",
                "use xform.flax.grad, or split the module with graphdef, params, rest = "
                "nnx.split(module, nnx.Param, ...) and pass only params",
            )
        check_input(caller, leaf, holomorphic, allow_int)


def check_input(caller: str, x: Any, holomorphic: bool, allow_int: bool) -> None:
    """Raise WrongDtype for an input that cannot be differentiated.

    That is an integer, unless `allow_int`. With `holomorphic` it is any input that is not complex.
    """
    aval = jax.typeof(as_array(x, caller))
    if is_differentiable_hitype(aval) and not holomorphic:
        return
    dtype = getattr(aval, "dtype", aval.str_short())
    if holomorphic and not jnp.issubdtype(dtype, np.complexfloating):
        raise WrongDtype(
            f"{caller} with holomorphic=True requires inputs with complex dtype",
            f"an input has dtype {dtype}",
            "",
            "pass complex inputs, or drop holomorphic",
        )
    if not jnp.issubdtype(dtype, np.inexact) and not allow_int:
        raise WrongDtype(
            f"{caller} requires real- or complex-valued inputs (a sub-dtype of np.inexact)",
            f"an input has dtype {dtype}",
            "",
            "pass a float, name other arguments in argnums, or set allow_int=True",
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
