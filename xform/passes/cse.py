"""Common subexpression elimination: merge equal equations."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from xform._jax import JaxprEqn, Literal
from xform.passes.base import Pass
from xform.passes.builder import Builder
from xform.passes.pure import is_pure
from xform.program.fingerprint import literal_text, operation_text
from xform.program.ir import Program


@dataclasses.dataclass(frozen=True)
class Cse(Pass):
    """Common subexpression elimination: replace equal equations by the first of them.

    Equations are equal if they have the same primitive, parameters, inputs and types. This includes
    random numbers drawn from one key, and calls of one traced program. Equations with effects are
    never merged, and neither are equations that `jax.checkpoint` or an optimization barrier keeps
    apart.

    >>> from xform import passes
    >>> f = passes.Cse()(lambda x: jnp.sin(x) * jnp.sin(x))
    >>> [e.primitive.name for e in jax.make_jaxpr(f)(1.0).eqns]
    ['sin', 'mul']
    """

    name: ClassVar[str] = "cse"

    def rewrite(self, prog: Program) -> Program:
        build = Builder(prog)
        # Equations with one primitive that read the same variables: the first, or all by their
        # texts. Few programs have two such equations, so texts are made when the second comes.
        alike: dict[Any, JaxprEqn | dict[tuple[str, ...], JaxprEqn]] = {}
        for eqn in map(build.renamed, prog.equations):
            key = eqn.primitive, *[None if isinstance(v, Literal) else v for v in eqn.invars]
            found = alike.setdefault(key, eqn)
            if found is not eqn and is_pure(eqn):
                if isinstance(found, JaxprEqn):
                    found = alike[key] = {_text(found): found}
                first = found.setdefault(_text(eqn), eqn)
                if first is not eqn:
                    build.alias(eqn.outvars, first.outvars)
                    continue
            build.add(eqn)
        return build.program()


def _text(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the text of an equation, without the variables that it reads."""
    return operation_text(eqn), *(literal_text(v) for v in eqn.invars if isinstance(v, Literal))
