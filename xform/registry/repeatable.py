"""Which equations a program may run a second time.

A backward pass that recomputes a value runs the equation of that value again. It may do so only if
both runs give the same value, and if the second run does nothing that must happen once. The trait
`repeatable` of a primitive says so. An equation with effects is not repeatable either.
"""

from __future__ import annotations

from collections.abc import Callable

from xform._jax import JaxprEqn, Primitive, jaxprs_of, side_effects
from xform.program.ir import Program, program
from xform.registry.table import rule_of
from xform.registry.traits import UNKNOWN

# Effects of prints. A print that runs twice changes no value.
PRINTS = frozenset(("DebugEffect", "OrderedDebugEffect"))
# Effects on mutable references. In a nested program the reference may belong to that program; if it
# does not, the equation that runs the program has the effect too.
_ON_REFERENCES = frozenset(("ReadEffect", "WriteEffect", "AccumEffect"))
# Words of rules whose primitives run no programs, to save time.
_WITHOUT_PROGRAMS = frozenset(("pointwise", "linear", "bilinear"))


# For a primitive that holds other things than programs, the function that finds its obstacles.
_OBSTACLES: dict[Primitive, Callable[[JaxprEqn], frozenset[str]]] = {}


def declare_obstacles(primitive: Primitive, find: Callable[[JaxprEqn], frozenset[str]]) -> None:
    """Let a function find why an equation of a primitive must not run twice."""
    _OBSTACLES[primitive] = find


def repeatable(eqn: JaxprEqn) -> bool:
    """Return whether a second run of an equation gives equal results and does nothing else."""
    return not repeat_obstacles(eqn)


def repeat_obstacles(eqn: JaxprEqn) -> frozenset[str]:
    """Return why an equation must not run twice; empty if it may.

    The result has the names of effects, and of primitives whose second run may give other values.
    Those in the programs that the equation runs are included, unless the trait of the primitive is
    a function, which decides about all of the equation.
    """
    if eqn.primitive in _OBSTACLES:
        return _OBSTACLES[eqn.primitive](eqn)
    rule, effects = rule_of(eqn.primitive), side_effects(eqn)
    known = UNKNOWN if rule is None else rule.traits
    if not isinstance(known.repeatable, bool):
        return effects if known.repeatable(eqn) else effects | {eqn.primitive.name}
    own = effects if known.repeatable else effects | {eqn.primitive.name}
    if rule is not None and rule.word in _WITHOUT_PROGRAMS and not known.call:
        return own
    return own.union(*(_obstacles_in(program(jaxpr)) for jaxpr in jaxprs_of(eqn)))


def _obstacles_in(prog: Program) -> frozenset[str]:
    """Return the obstacles in a nested program. Cached on the program."""
    key = "repeat obstacles"
    if key not in prog.cache:
        found = frozenset[str]().union(*map(repeat_obstacles, prog.equations))
        prog.cache[key] = found - _ON_REFERENCES
    return prog.cache[key]
