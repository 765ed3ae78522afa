"""Equations of a jaxpr: their inputs read from an environment, their primitives bound again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import lax

from xform._jax import JaxprEqn, Literal, Primitive, Var, equation
from xform.source import name_stack, source

Atom = Var | Literal


class Applied:
    """The equation of an operation that is differentiated as it runs, made as far as it is read.

    A whole one takes as long to make as a small operation takes to run; most rules read only what
    is applied, and the types of the outputs, which are known where it was run.
    """

    def __init__(self, primitive: Primitive, params: dict[str, Any], avals: Sequence[Any],
                 outputs: list[Var] | None):  # fmt: skip
        self.primitive, self.params, self._avals = primitive, params, avals
        if outputs is not None:
            self.outvars = outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    @functools.cached_property
    def _whole(self) -> JaxprEqn:
        outputs = self.__dict__.get("outvars")
        return equation(self.primitive, list(map(Var, self._avals)), self.params, outputs)


def read(env: dict[Var, Any], atom: Atom) -> Any:
    """The value of a variable or literal."""
    if not isinstance(atom, Literal):
        return env[atom]
    # The only literal of JAX that is a plain Python number, without a dtype, is a truth value.
    return np.bool_(atom.val) if isinstance(atom.val, bool) else atom.val


def write(env: dict[Var, Any], variables: Iterable[Var], values: Sequence[Any]) -> None:
    """Give variables their values."""
    env.update(zip(variables, values, strict=True))


def bind(eqn: JaxprEqn, args: Sequence[Any], outer: Any = None) -> list[Any]:
    """Apply an equation's primitive to `args`, where it was written; a list of outputs.

    `outer` is the current name stack; give it when many equations are bound in a row.
    """
    with source(eqn, name_stack() if outer is None else outer), eqn.ctx.manager:
        return apply(eqn, args)


def apply(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """The same where the code is now, which already stands for where the equation was written."""
    prim = eqn.primitive
    out = prim.bind(*args, **prim.get_bind_params(eqn.params))
    return list(out) if prim.multiple_results else [out]


def scan_options(params: dict[str, Any]) -> dict[str, Any]:
    """What `lax.scan` is given, besides functions and values, to make a scan like one."""
    names = ("length", "reverse", "unroll", "_split_transpose")
    return {k: params[k] for k in names if k in params}


def switch(params: dict[str, Any], index: Any, branches: Sequence[Callable[..., Any]],
           *operands: Any) -> Any:  # fmt: skip
    """One of the branches, chosen as an equation of a cond chooses: by index, or by platform.

    Of `lax.platform_dependent`, those of other platforms are never compiled, and need not compile.
    """
    if (platforms := params.get("branches_platforms")) is None:
        return lax.switch(index, branches, *operands)
    pairs = list(zip(platforms, branches, strict=True))
    by_name = {name: branch for names, branch in pairs for name in names or ()}
    default = next((branch for names, branch in pairs if names is None), None)
    return lax.platform_dependent(*operands, default=default, **by_name)
