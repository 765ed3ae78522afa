"""Which equations a program may run a second time.

A backward pass that recomputes a value runs the equation of that value again. It may do so only if
both runs give the same value, and if the second run does nothing that must happen once. The trait
`repeatable` of a primitive says so. An equation with effects is not repeatable either.
"""

from __future__ import annotations

from xform._jax import JaxprEqn, jaxprs_of, side_effects
from xform.program.ir import Program, program
from xform.registry.table import traits

# Effects of prints. A print that runs twice changes no value.
PRINTS = frozenset(("DebugEffect", "OrderedDebugEffect"))


def repeatable(eqn: JaxprEqn) -> bool:
    """Return whether a second run of an equation gives equal results and does nothing else."""
    return not repeat_obstacles(eqn)


def repeat_obstacles(eqn: JaxprEqn) -> frozenset[str]:
    """Return why an equation must not run twice; empty if it may.

    The result has the names of effects, and of primitives whose second run may give other values.
    Those in the programs that the equation runs are included.
    """
    obstacles = side_effects(eqn)
    stated = traits(eqn.primitive).repeatable
    if not (stated if isinstance(stated, bool) else stated(eqn)):
        obstacles |= {eqn.primitive.name}
    return obstacles.union(*(_obstacles_in(program(jaxpr)) for jaxpr in jaxprs_of(eqn)))


def _obstacles_in(prog: Program) -> frozenset[str]:
    """Return the primitives in a program that must not run twice. Cached on the program.

    The effects are those of the equation that runs the program: effects on a mutable value that
    lives only in the program are not among them.
    """
    key = "repeat obstacles"
    if key not in prog.cache:
        found = (repeat_obstacles(eqn) - side_effects(eqn) for eqn in prog.equations)
        prog.cache[key] = frozenset[str]().union(*found)
    return prog.cache[key]
