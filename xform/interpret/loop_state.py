"""What of a loop's state must be stored, so that any of its steps can be run again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from xform._jax import Var
from xform.interpret.joint import Joint, Schedule
from xform.interpret.node import gather
from xform.ir import Atom
from xform.passes.dce import live

_NONE: Mapping[Var, Var] = {}


def needed(
    schedule: Schedule, carried: Mapping[Var, Atom], ahead: Mapping[Var, Var] = _NONE
) -> set[Var]:
    """Inputs of a step from which all that its backward part reads is made, here and before.

    `carried` has, by the input, the output that it becomes; `ahead`, those of these that are at
    hand after a step. A least fixpoint: what makes a needed carry is needed too.
    """
    joint, inputs = schedule.joint, set(schedule.joint.inputs)
    need = {*gather(joint.inputs, schedule.reads), *ahead}
    need |= read_for(joint, schedule.kept, ahead.values())
    need &= inputs
    while True:
        goal = [carried[v] for v in need if v in carried]
        sources = {v for v in goal if isinstance(v, Var)} | read_for(joint, goal)
        grown = need | (inputs & sources)
        if grown == need:
            return need
        need = grown


def read_for(joint: Joint, wanted: Iterable[Atom], known: Iterable[Var] = ()) -> set[Var]:
    """What the equations of a step read that make `wanted` values from `known` ones."""
    equations = live(joint.forward, wanted, set(known), effects=False)
    return {v for e in equations for v in e.invars if isinstance(v, Var)}
