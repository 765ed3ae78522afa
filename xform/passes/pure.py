"""Which equations may be merged with others like them, or run at once."""

from __future__ import annotations

from xform._jax import JaxprEqn, jaxprs_of
from xform.ir import Program, program

# Without a declared effect, but not to be merged: what keeps values apart for the compiler, so that
# a recompute stays one, and what draws numbers from a state.
_APART = frozenset(("optimization_barrier", "tie", "remat2", "rng_uniform"))


def pure(eqn: JaxprEqn) -> bool:
    """Whether an equation depends on its inputs alone, and one like it may stand for it."""
    if eqn.effects or eqn.primitive.name in _APART:
        return False
    return all(_pure(program(j)) for j in jaxprs_of(eqn))


def _pure(prog: Program) -> bool:
    if "pure" not in prog.cache:
        prog.cache["pure"] = all(map(pure, prog.equations))
    return prog.cache["pure"]
