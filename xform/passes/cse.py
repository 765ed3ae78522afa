"""Common subexpressions: equations that do the same to the same values, merged."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from xform._jax import JaxprEqn, Literal
from xform.fingerprint import literal, operation
from xform.ir import Program
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
            reads = (literal(v) if isinstance(v, Literal) else v for v in eqn.invars)
            first = seen.setdefault((operation(eqn), *reads), eqn) if pure(eqn) else eqn
            if first is eqn:
                build.add(eqn)
            else:
                build.alias(eqn.outvars, first.outvars)
        return build.program()
