"""Find which parts of a loop's state to store, so that every step can be recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from xform._jax import Var
from xform.interpret.joint import Joint, Schedule
from xform.interpret.node import gather
from xform.passes.dce import live
from xform.program.ir import Atom

_NONE: Mapping[Var, Var] = {}


def needed_inputs(
    schedule: Schedule, carried: Mapping[Var, Atom], ahead: Mapping[Var, Var] = _NONE
) -> set[Var]:
    """Return the inputs of a step to store, from which all its backward part reads is computed.

    `carried` maps an input to the output that becomes its next value. `ahead` does so for the
    inputs whose value after the step is available. The result is a least fixpoint: the inputs that
    a needed carry is computed from are needed too.
    """
    joint, inputs = schedule.joint, set(schedule.joint.inputs)
    need = {*gather(joint.inputs, schedule.reads), *ahead}
    need |= values_read(joint, schedule.saved, ahead.values())
    need &= inputs
    while True:
        goal = [carried[v] for v in need if v in carried]
        sources = {v for v in goal if isinstance(v, Var)} | values_read(joint, goal)
        grown = need | (inputs & sources)
        if grown == need:
            return need
        need = grown


def values_read(joint: Joint, wanted: Iterable[Atom], known: Iterable[Var] = ()) -> set[Var]:
    """Return what the equations of a step read to compute `wanted` values from `known` ones."""
    equations = live(joint.forward, wanted, set(known), effects=False)
    return {v for e in equations for v in e.invars if isinstance(v, Var)}
