"""Refuse checks that would test nothing, or that rounding errors would make meaningless.

In each function `caller` names the check in the error, such as "check_grads".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.errors import WrongArgument
from xform.program.arithmetic import differentiable


def check_names(caller: str, argument: str, names: Collection[str], known: Sequence[str],
                left_out: Collection[str] = ()) -> None:  # fmt: skip
    """Raise `WrongArgument` unless `names`, the value of an argument, lists some `known` names.

    Names in `left_out` do not count, because the Case leaves them out.
    """
    if isinstance(names, str):
        problem = "it is one text, not a list of names"
    elif unknown := [name for name in names if name not in known]:
        problem = f"{unknown[0]!r} is unknown"
    elif all(name in left_out for name in names):
        problem = "nothing is left to check"
    else:
        return
    raise WrongArgument(
        f"{caller} with {argument}={names!r}", problem, "", f"give a list of some of {tuple(known)}"
    )


def check_point(caller: str, args: Any) -> None:
    """Raise `WrongArgument` if no argument is an array of floats."""
    if not any(differentiable(jax.typeof(x)) for x in jax.tree.leaves(args)):
        raise WrongArgument(
            caller,
            "there is nothing to differentiate: no argument is an array of floats",
            "",
            "give a point to check, as float64 arrays",
        )


def check_outputs(caller: str, outputs: Any) -> None:
    """Raise `WrongArgument` if the function returns no arrays."""
    if not jax.tree.leaves(outputs):
        raise WrongArgument(
            caller, "there is nothing to compare: the function returns no array", "",
            "return the outputs that the rule is for",
        )  # fmt: skip


def check_precision(caller: str, kind: str, arrays: Any) -> None:
    """Raise `WrongArgument` if arrays are too inexact for finite differences.

    `kind` says in the error what the arrays are: "an argument" or "an output".
    """
    dtypes = [x.dtype for x in jax.tree.leaves(arrays) if differentiable(x)]
    if narrow := [dtype for dtype in dtypes if jnp.finfo(dtype).bits < 64]:
        raise WrongArgument(
            f"{caller} in {narrow[0]}",
            f"{kind} has dtype {narrow[0]}, too inexact to check a derivative by differences",
            "",
            "compute in float64: set jax.config.update('jax_enable_x64', True) and pass float64 "
            "arrays",
        )
