"""Find equations that may be merged with equal ones, or evaluated early."""

from __future__ import annotations

from xform._jax import JaxprEqn, has_effects, jaxprs_of
from xform.program.ir import Program, program
from xform.registry.table import traits


def is_pure(eqn: JaxprEqn) -> bool:
    """Whether an equation depends on its inputs alone, and may be merged with an equal one."""
    if has_effects(eqn) or not traits(eqn.primitive).pure:
        return False
    return all(_pure(program(j)) for j in jaxprs_of(eqn))


def _pure(prog: Program) -> bool:
    if "pure" not in prog.cache:
        prog.cache["pure"] = all(map(is_pure, prog.equations))
    return prog.cache["pure"]
