"""Find equations that a pass may merge with equal equations, or evaluate at trace time."""

from __future__ import annotations

from xform._jax import JaxprEqn, jaxprs_of
from xform.program.ir import Program, program
from xform.registry.repeatable import repeatable
from xform.registry.table import traits


def is_pure(eqn: JaxprEqn) -> bool:
    """Return whether an equation depends on its inputs alone, and may be merged with an equal one.

    Neither the equation nor an equation of its nested programs may have an effect, such as a print,
    or draw random numbers without a key. A remat region or a barrier is not pure: its purpose is to
    keep equations from being merged.
    """
    if not repeatable(eqn) or not traits(eqn.primitive).pure:
        return False
    return all(_all_pure(program(j)) for j in jaxprs_of(eqn))


def _all_pure(prog: Program) -> bool:
    """Return whether all equations of a program are pure. Cached on the program."""
    if "pure" not in prog.cache:
        prog.cache["pure"] = all(map(is_pure, prog.equations))
    return prog.cache["pure"]
