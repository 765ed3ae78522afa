"""Which equations may be merged with others like them, or run at once."""

from __future__ import annotations

from xform._jax import JaxprEqn, has_effects, jaxprs_of
from xform.ir import Program, program
from xform.table import traits


def pure(eqn: JaxprEqn) -> bool:
    """Whether an equation depends on its inputs alone, and one like it may stand for it."""
    if has_effects(eqn) or not traits(eqn.primitive).pure:
        return False
    return all(_pure(program(j)) for j in jaxprs_of(eqn))


def _pure(prog: Program) -> bool:
    if "pure" not in prog.cache:
        prog.cache["pure"] = all(map(pure, prog.equations))
    return prog.cache["pure"]
