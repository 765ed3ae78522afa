"""List the values that are saved for the backward pass, in loops and calls too.

A *Schedule* says for one program which values are saved, offloaded or recomputed. A *node* is a
loop, branch or call of that program (the equation `fork_p` in its forward pass); the programs
inside have Schedules of their own. One saved value, the node's *token*, stands for all values that
are saved inside the node. This file replaces a token by these values, which a loop stacks over its
iterations.

A value may be saved inside a call or loop and also be an output of the call or loop. Then it is in
one buffer, and it is listed only once: as a value inside the call or loop.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Joint, Schedule
from xform.interpret.node import Node, fork_p, gather
from xform.policies import TAG
from xform.registry.table import label


@dataclasses.dataclass(frozen=True, eq=False)
class SavedValue:
    """One value that is saved for the backward pass.

    Attributes:
      kind: "kept": computed and saved. "carry": the state of a loop, saved in some or all
        iterations. "shared": saved by one branch of a `cond`, in memory that is counted for a value
        of another branch. "argument": an input that the backward pass reads (only in the table of
        `report/residuals.py`).
      aval: its type in one iteration.
      origin: the equation that computes it, inside calls and loops too, and its `checkpoint_name`
        ("" if it has none); None for an input.
      why: the reason why it is saved.
      loops: trip counts of the loops that stack it, outermost first.
      memory: "device", or the memory it is offloaded to.
    """

    kind: str
    aval: Any
    origin: tuple[JaxprEqn, str] | None
    why: str
    loops: tuple[int, ...] = ()
    memory: str = "device"

    @property
    def total_bytes(self) -> int:
        """Bytes in all iterations; 0 for a shared value, whose memory another value counts."""
        return aval_bytes(self.aval) * math.prod(self.loops) if self.kind != "shared" else 0


def saved_values(schedule: Schedule) -> list[SavedValue]:
    """Return all values that a Schedule saves, in nested programs too.

    Cost: linear in the number of these values.
    """
    return _expand(schedule, schedule.saved)


def device_bytes(values: Iterable[SavedValue]) -> int:
    """Return the total bytes of the values that are saved on the device."""
    return sum(v.total_bytes for v in values if v.memory == "device")


def _expand(schedule: Schedule, values: Sequence[Var]) -> list[SavedValue]:
    """Return `values` of a Schedule as SavedValues; a token is replaced by the values in it."""
    listed: list[SavedValue] = []
    for v in values:
        eqn = schedule.joint.producer[v]
        node = eqn.params["node"] if eqn.primitive is fork_p else None
        if node and v is eqn.outvars[-1]:
            listed += expand_token(node, schedule.inner[node])
        elif not (node and eqn.outvars[-1] in schedule.saved and _in_token(schedule, eqn, v)):
            memory = schedule.offloaded[v].dst if v in schedule.offloaded else "device"
            origin = _origin(schedule.joint, v)
            listed.append(SavedValue("kept", v.aval, origin, schedule.why[v], memory=memory))
    return listed


def _in_token(schedule: Schedule, eqn: JaxprEqn, v: Var) -> bool:
    """Return whether the token of a node holds the output `v` of the node, in the same memory.

    `eqn` is the equation of the node in the forward pass.
    """
    node: Node = eqn.params["node"]
    if len(node.joints) != 1:
        return False
    (inner,), (joint,) = schedule.inner[node], node.joints
    invariant = set(gather(inner.saved, node.hoisted_values(inner)))
    in_token = {u for u in node.token_values(inner) if u not in invariant}
    in_token |= set(gather(joint.inputs, node.stacked_inputs([inner])))
    in_token -= inner.offloaded.keys()
    output = joint.outputs[eqn.outvars.index(v)]
    # An output of a loop is either stacked, like the values saved inside, or part of the final
    # state. A stacked output has one axis more than in the loop's body.
    stacked = _ndim(v) == _ndim(output) + node.loop
    return isinstance(output, Var) and output in in_token and stacked


def _ndim(v: Any) -> int:
    """Return the number of axes of a value; 0 if its type has no shape."""
    return len(getattr(v.aval, "shape", ()))


def _trip_counts(node: Node) -> tuple[int, ...]:
    """Return the trip count of a node that is a loop, in a tuple; () for another node."""
    return (node.iterations,) if node.loop else ()


def expand_token(node: Node, schedules: Sequence[Schedule]) -> list[SavedValue]:
    """Return the values in a node's token: the values saved inside, and the states of a loop.

    `schedules` are those of the node's programs: several for a `cond`, one for another node.
    """
    if len(schedules) != 1:
        return _branches(schedules)
    (schedule,), joint = schedules, schedules[0].joint
    invariant = set(gather(schedule.saved, node.hoisted_values(schedule)))
    in_token = node.token_values(schedule)
    listed = _expand(schedule, [v for v in in_token if v in invariant])
    for value in _expand(schedule, [v for v in in_token if v not in invariant]):
        listed.append(dataclasses.replace(value, loops=(*_trip_counts(node), *value.loops)))
    for i, n in enumerate(node.stored_states(schedules)):
        if n:
            v, output = joint.inputs[i], joint.outputs[i - node.first_carry]
            origin = _origin(joint, output) or (node.eqn, "")
            memory = schedule.offloaded[v].dst if v in schedule.offloaded else "device"
            why = state_reason(node, schedule, i)
            listed.append(SavedValue("carry", v.aval, origin, why, (n,), memory))
    return listed


def state_reason(node: Node, schedule: Schedule, i: int) -> str:
    """Return the reason why a loop saves states of input `i` of its body, given its Schedule."""
    if node.moved_back(schedule)[i]:
        return "the last state of the loop, which the backward pass moves back between devices"
    if schedule.snapshots is None:
        return "the state of the loop in each iteration"
    return "a state of the loop, from which others are recomputed"


def _branches(schedules: Sequence[Schedule]) -> list[SavedValue]:
    """Return the values that all branches of a cond save.

    Only one branch runs, so the branches share memory. A slot is memory for one value of some shape
    and dtype. A value that uses a slot of an earlier branch is "shared".
    """
    n_slots = collections.Counter[Any]()
    listed: list[SavedValue] = []
    for schedule in schedules:
        n_unused = n_slots.copy()
        for value in _expand(schedule, schedule.saved):
            slot = (*value.loops, *value.aval.shape), value.aval.dtype
            reused = value.kind != "shared" and n_unused[slot] > 0
            n_unused[slot] -= reused
            n_slots[slot] += value.kind != "shared" and not reused
            listed.append(dataclasses.replace(value, kind="shared") if reused else value)
    return listed


def _origin(joint: Joint, v: Any) -> tuple[JaxprEqn, str] | None:
    """Return the equation that computes a value, and the value's `checkpoint_name` or "".

    If a call or loop computes the value, the equation is the one inside it. None: no equation of
    the forward pass computes the value.
    """
    name = ""
    producer = None
    while isinstance(v, Var) and (eqn := joint.producer.get(v)) is not None:
        producer = eqn
        if (given := label(eqn.primitive, eqn.params)) is not None:
            name, v = name or ("" if given.startswith(TAG) else given), eqn.invars[0]
        elif eqn.primitive is fork_p and len(eqn.params["node"].joints) == 1:
            (joint,), i = eqn.params["node"].joints, eqn.outvars.index(v)
            v = joint.outputs[i]
        else:
            break
    return (producer, name) if producer else None
