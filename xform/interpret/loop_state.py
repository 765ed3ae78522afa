"""Find which parts of a loop's state to store, so that every step can be recomputed.

The backward pass of a loop needs, for each step, values of the forward pass. It recomputes them
from stored parts of the state before that step. A step is one call of the loop's body. Its Joint
(`interpret.joint`) is the forward and the backward part of the body as one program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from xform._jax import JaxprEqn, Var
from xform.interpret.joint import Joint, Schedule
from xform.interpret.node import gather
from xform.passes.dce import live
from xform.program.ir import Atom

_NONE: Mapping[Var, Var] = {}


def needed_inputs(
    schedule: Schedule, carried: Mapping[Var, Atom], known_after: Mapping[Var, Var] = _NONE
) -> set[Var]:
    """Return the inputs of a step whose values suffice to run its backward part.

    The result has the inputs that the backward part reads, and the inputs that its saved values are
    computed from. If a part of the state is in the result, so are the inputs that its next value is
    computed from, so that the backward pass can advance the stored state step by step.

    Args:
      schedule: the Schedule of the step's Joint. It says what the backward part reads and saves.
      carried: for each input that is part of the state, the output that becomes its next value.
      known_after: the same, for the parts of the state whose value after the step is available.
        Saved values that are computed from these need no input.
    """
    joint, inputs = schedule.joint, set(schedule.joint.inputs)
    needed = {*gather(joint.inputs, schedule.reads), *known_after}
    needed |= values_read(joint, schedule.saved, known_after.values())
    needed &= inputs
    while True:
        next_values = [carried[v] for v in needed if v in carried]
        sources = {v for v in next_values if isinstance(v, Var)} | values_read(joint, next_values)
        grown = needed | (inputs & sources)
        if grown == needed:
            return needed
        needed = grown


def recomputed_equations(joint: Joint, carried: Mapping[Var, Atom]) -> tuple[JaxprEqn, ...]:
    """Return the forward equations of a step that run again, if all steps start from stored states.

    They compute what the backward part of the step reads, and the next values of the needed parts
    of the state. `carried` is explained at `needed_inputs`.
    """
    reads = (v for eqn in joint.backward for v in eqn.invars)
    wanted = {v for v in (*reads, *joint.backward_outputs) if isinstance(v, Var)}
    while True:
        equations = live(joint.forward, wanted, effects=False)
        read = wanted.union(v for eqn in equations for v in eqn.invars if isinstance(v, Var))
        next_values = {y for v, y in carried.items() if v in read and isinstance(y, Var)}
        if next_values <= wanted:
            return equations
        wanted |= next_values


def values_read(joint: Joint, wanted: Iterable[Atom], known: Iterable[Var] = ()) -> set[Var]:
    """Return the variables that equations read, to compute `wanted` values from `known` ones.

    The equations are those of the forward part of `joint`.
    """
    equations = live(joint.forward, wanted, set(known), effects=False)
    return {v for e in equations for v in e.invars if isinstance(v, Var)}
