"""Evaluate equations of a jaxpr: read inputs, bind the primitive, write outputs.

To *bind* a primitive is to run it in the current trace: it computes values, or adds an equation to
the program that is being traced. An *environment* is a dict from variables to their values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax import lax

from xform._jax import (
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    conv_general_dilated_p,
    dot_general_p,
    equation,
    primitive_named,
)
from xform._jax.contexts import also_wide, has_wide
from xform._jax.symbolic import is_symbolic
from xform.program.source import name_stack, source

Atom = Var | Literal


class EagerEquation:
    """An equation for an operation that runs eagerly; it builds the `JaxprEqn` on demand.

    Building a `JaxprEqn` takes as long as a small operation takes to run. Most rules read only the
    primitive, the parameters and the types of inputs and outputs, which are known without it.
    `avals` are the types of the inputs. `outputs` are the output variables, or values in their
    place; None: they are made on demand.
    """

    def __init__(self, primitive: Primitive, params: dict[str, Any], avals: Sequence[Any],
                 outputs: list[Var] | None):  # fmt: skip
        self.primitive, self.params, self.avals = primitive, params, avals
        if outputs is not None:
            self.outvars = outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._equation, name)

    @functools.cached_property
    def invars(self) -> list[Var]:
        """Variables for the inputs."""
        return list(map(Var, self.avals))

    @functools.cached_property
    def _equation(self) -> JaxprEqn:
        outputs = self.__dict__.get("outvars")
        return equation(self.primitive, self.invars, self.params, outputs)


def read(env: dict[Var, Any], atom: Atom) -> Any:
    """Return the value of a variable or literal."""
    if not isinstance(atom, Literal):
        return env[atom]
    # A bool is the only literal of JAX that is a plain Python value without a dtype.
    return np.bool_(atom.val) if isinstance(atom.val, bool) else atom.val


def write(env: dict[Var, Any], variables: Iterable[Var], values: Sequence[Any]) -> None:
    """Set the values of variables in an environment."""
    env.update(zip(variables, values, strict=True))


def context(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """Return the context in which an equation was traced, for its operation and for its rules.

    It has the mesh and the compute type of the equation, and enables 64-bit dtypes if the equation
    has values of such a dtype.
    """
    manager = eqn.ctx.manager
    if has_wide(eqn.outvars) or has_wide(eqn.invars):
        return also_wide(manager)
    return manager


def bind(eqn: JaxprEqn, args: Sequence[Any], outer: Any = None) -> list[Any]:
    """Bind an equation's primitive to `args`; returns a list of outputs.

    The operation gets the source line, name scopes and context of the equation. `outer` is the
    current name stack. Pass it if you bind many equations in a row, to look it up once.
    """
    with source(eqn, name_stack() if outer is None else outer), context(eqn):
        return apply(eqn, args)


# Products. Such a function uses `jax.default_matmul_precision` if its argument `precision` is None.
_PRODUCTS: dict[Any, Callable[..., Any]] = {
    dot_general_p: lax.dot_general,
    conv_general_dilated_p: lax.conv_general_dilated,
    primitive_named("ragged_dot_general"): lax.ragged_dot_general,
}


def takes_default_precision(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a product for which no precision was set."""
    return eqn.primitive in _PRODUCTS and eqn.params["precision"] is None


def bind_at_default_precision(eqn: JaxprEqn, args: Sequence[Any], outer: Any) -> list[Any]:
    """Bind a product at the precision that `jax.default_matmul_precision` sets now.

    `outer` is the current name stack.
    """
    with source(eqn, outer), context(eqn):
        return [_PRODUCTS[eqn.primitive](*args, **eqn.params)]


def apply(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Bind an equation's primitive to `args`; returns a list of outputs.

    The operation gets the current source line, name scopes and context.
    """
    prim = eqn.primitive
    out = prim.bind(*args, **prim.get_bind_params(eqn.params))
    return list(out) if prim.multiple_results else [out]


def scan_options(params: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `lax.scan` for a scan with these parameters."""
    names = ("length", "reverse", "unroll", "_split_transpose")
    return {k: params[k] for k in names if k in params}


def scan_like(params: dict[str, Any], step: Callable[..., Any], carry: Any, xs: Any) -> Any:
    """Run `lax.scan` with the options of another scan, which has the parameters `params`.

    `lax.scan` takes no symbolic length, but infers it from the arrays that it scans.
    """
    options = scan_options(params)
    if not is_symbolic(options["length"]):
        return lax.scan(step, carry, xs, **options)
    length = options.pop("length")
    if jax.tree.leaves(xs):
        return lax.scan(step, carry, xs, **options)
    return lax.scan(lambda carry, _: step(carry, xs), carry, lax.iota(np.int32, length), **options)


def switch(params: dict[str, Any], index: Any, branches: Sequence[Callable[..., Any]],
           *operands: Any) -> Any:  # fmt: skip
    """Bind a cond with new branches. `params` are the parameters of the cond that it replaces.

    The new cond selects like the old one: by `index`, or by platform. `lax.platform_dependent`
    makes a cond that selects by platform. Its branches for other platforms are never compiled, and
    some of them cannot be compiled.
    """
    if (platforms := params.get("branches_platforms")) is None:
        return lax.switch(index, branches, *operands)
    pairs = list(zip(platforms, branches, strict=True))
    by_name = {name: branch for names, branch in pairs for name in names or ()}
    default = next((branch for names, branch in pairs if names is None), None)  # other platforms
    return lax.platform_dependent(*operands, default=default, **by_name)
