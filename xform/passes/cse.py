"""Common subexpressions: equations that do the same to the same values, merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any, ClassVar

import numpy as np

from xform._jax import JaxprEqn, Literal
from xform.ir import Atom, Program
from xform.passes.base import Pass
from xform.passes.builder import Builder
from xform.passes.pure import pure


@dataclasses.dataclass(frozen=True)
class Cse(Pass):
    """Common subexpressions: of equations alike, the first stands for all.

    Equations are alike that have the same primitive, parameters, inputs and types: random numbers
    of one key among them. Effects are never merged, nor what `jax.checkpoint` and optimization
    barriers keep apart. Calls are alike if they call the same traced program.

    >>> from xform import passes
    >>> f = passes.Cse()(lambda x: jnp.sin(x) * jnp.sin(x))
    >>> [e.primitive.name for e in jax.make_jaxpr(f)(1.0).eqns]
    ['sin', 'mul']
    """

    name: ClassVar[str] = "cse"

    def rewrite(self, prog: Program) -> Program:
        build = Builder(prog)
        seen: dict[Any, JaxprEqn] = {}
        for eqn in map(build.renamed, prog.equations):
            key = _key(eqn) if pure(eqn) else None
            first = seen.setdefault(key, eqn) if key is not None else eqn
            if first is eqn:
                build.add(eqn)
            else:
                build.alias(eqn.outvars, first.outvars)
        return build.program()


def _key(eqn: JaxprEqn) -> Any:
    """What alike equations have in common; None if that cannot be said."""
    params = tuple((k, _frozen(v)) for k, v in sorted(eqn.params.items()))
    types = tuple(v.aval for v in eqn.outvars)
    key = eqn.primitive, eqn.ctx, params, types, tuple(map(_atom, eqn.invars))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Hashable:
    """A parameter as something that is equal to what is the same only: 1, 1.0 and True differ."""
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, float | complex | np.generic):
        return type(value), np.asarray(value).tobytes()
    return type(value), value


def _atom(atom: Atom) -> Hashable:
    if not isinstance(atom, Literal):
        return atom
    value = np.asarray(atom.val)
    # Bits, since -0.0 == 0.0 and NaN != NaN.
    return atom.aval, value.dtype, value.tobytes()
