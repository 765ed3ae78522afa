"""What a Schedule holds for the backward part, value by value.

The walk follows the Schedule: a token among the kept values stands for what its loop, call or
branch keeps, once per trip. A value that is both kept inside a call or loop and one of its outputs
is one buffer, and is listed once, where it was made.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var, name_p
from xform.cost import aval_bytes
from xform.interpret.joint import Joint, Schedule
from xform.interpret.node import Node, fork_p, gather
from xform.policies import TAG


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """One value that waits for the backward part.

    Attributes:
      kind: "kept", "carry" or "shared", as in a `Residual`.
      aval: its type in one trip.
      origin: the equation that made it, inside the calls and loops it came through, and its name.
      why: why it is kept.
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
        """Bytes of all trips; a shared value has none of its own."""
        return aval_bytes(self.aval) * math.prod(self.loops) if self.kind != "shared" else 0


def held(schedule: Schedule) -> list[Held]:
    """All that a Schedule holds. Linear in its kept values, those of nested Schedules included."""
    return _kept(schedule, schedule.kept)


def held_bytes(values: Iterable[Held]) -> int:
    """Bytes on the device of values that are held together."""
    return sum(v.total_bytes for v in values if v.memory == "device")


def _kept(schedule: Schedule, values: Sequence[Var]) -> list[Held]:
    """Some of the values that a Schedule keeps; for a token, those of its nested Schedules."""
    rows: list[Held] = []
    for v in values:
        eqn = schedule.joint.producer[v]
        node = eqn.params["node"] if eqn.primitive is fork_p else None
        if node and v is eqn.outvars[-1]:
            rows += token(node, schedule.inner[node])
        elif not (node and eqn.outvars[-1] in schedule.kept and _inside(schedule, eqn, v)):
            memory = schedule.offloaded[v].dst if v in schedule.offloaded else "device"
            rows.append(
                Held("kept", v.aval, _origin(schedule.joint, v), schedule.why[v], memory=memory)
            )
    return rows


def _inside(schedule: Schedule, eqn: JaxprEqn, v: Var) -> bool:
    """Whether an output of a node is, in the same memory, among what its token holds."""
    node: Node = eqn.params["node"]
    if len(node.joints) != 1:
        return False
    (inner,), (joint,) = schedule.inner[node], node.joints
    once = set(gather(inner.kept, node.hoisted(inner)))
    held = {u for u in node.keeps(inner) if u not in once}
    held = held.union(gather(joint.inputs, node.stacked([inner]))).difference(inner.offloaded)
    output = joint.outputs[eqn.outvars.index(v)]
    # An output of a loop is either stacked like what is kept inside it, or its last state.
    stacked = _ndim(v) == _ndim(output) + node.loop
    return isinstance(output, Var) and output in held and stacked


def _ndim(v: Any) -> int:
    return len(getattr(v.aval, "shape", ()))


def _loops(node: Node) -> tuple[int, ...]:
    return (node.trips,) if node.loop else ()


def token(node: Node, schedules: Sequence[Schedule]) -> list[Held]:
    """What a node's token holds."""
    if len(schedules) != 1:
        return _branches(schedules)
    (schedule,), joint = schedules, schedules[0].joint
    once = {v for v, on in zip(schedule.kept, node.hoisted(schedule), strict=True) if on}
    held = node.keeps(schedule)
    rows = _kept(schedule, [v for v in held if v in once])
    for r in _kept(schedule, [v for v in held if v not in once]):
        rows.append(dataclasses.replace(r, loops=(*_loops(node), *r.loops)))
    for i, n in enumerate(node.copies(schedules)):
        if n:
            v, output = joint.inputs[i], joint.outputs[i - node.first_carry]
            origin = _origin(joint, output) or (node.eqn, "")
            memory = schedule.offloaded[v].dst if v in schedule.offloaded else "device"
            rows.append(Held("carry", v.aval, origin, state_why(schedule), (n,), memory))
    return rows


def state_why(schedule: Schedule) -> str:
    """Why a loop with such a Schedule of its body keeps states."""
    if schedule.snapshots is None:
        return "the state of the loop in each trip"
    return "a state of the loop, to run it again from"


def _branches(schedules: Sequence[Schedule]) -> list[Held]:
    """Rows of all branches of a cond: as one branch runs, a slot of memory serves each of them."""
    slots = collections.Counter[Any]()
    rows: list[Held] = []
    for schedule in schedules:
        free = slots.copy()
        for row in _kept(schedule, schedule.kept):
            slot = (*row.loops, *row.aval.shape), row.aval.dtype
            taken = row.kind != "shared" and free[slot] > 0
            free[slot] -= taken
            slots[slot] += row.kind != "shared" and not taken
            rows.append(dataclasses.replace(row, kind="shared") if taken else row)
    return rows


def _origin(joint: Joint, v: Any) -> tuple[JaxprEqn, str] | None:
    """The equation that made a value, inside the calls and loops it came through, and its name."""
    name = ""
    maker = None
    while isinstance(v, Var) and (eqn := joint.producer.get(v)) is not None:
        maker = eqn
        if eqn.primitive is name_p:
            label = eqn.params["name"]
            name, v = name or ("" if label.startswith(TAG) else label), eqn.invars[0]
        elif eqn.primitive is fork_p and len(eqn.params["node"].joints) == 1:
            (joint,), at = eqn.params["node"].joints, eqn.outvars.index(v)
            v = joint.outputs[at]
        else:
            break
    return (maker, name) if maker else None
