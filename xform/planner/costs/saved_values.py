"""The values that a Schedule saves for the backward part, as a list.

A Schedule is a plan for one program: which values are saved, offloaded or recomputed. A token among
the saved values stands for the residuals of a loop, call or branch. It is expanded into those
residuals, with one copy per iteration of a loop. A value that is saved inside a call or loop and is
also an output of it is one buffer. It is listed once, at the place that made it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var, name_p
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Joint, Schedule
from xform.interpret.node import Node, fork_p, gather
from xform.policies import TAG


@dataclasses.dataclass(frozen=True, eq=False)
class SavedValue:
    """One value that is saved for the backward part.

    Attributes:
      kind: "kept", "carry" or "shared", as in a `Residual`.
      aval: its type in one iteration.
      origin: the equation that made it, found inside calls and loops, and its `checkpoint_name`.
      why: why it is saved.
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
        """Bytes in all iterations; 0 for a shared value, which uses another row's memory."""
        return aval_bytes(self.aval) * math.prod(self.loops) if self.kind != "shared" else 0


def saved_values(schedule: Schedule) -> list[SavedValue]:
    """Return all values that a Schedule saves. Linear in them, nested Schedules included."""
    return _expand(schedule, schedule.saved)


def device_bytes(values: Iterable[SavedValue]) -> int:
    """Return the total bytes of the values that are saved on the device."""
    return sum(v.total_bytes for v in values if v.memory == "device")


def _expand(schedule: Schedule, values: Sequence[Var]) -> list[SavedValue]:
    """The rows of some saved values. A token gives the rows of its nested Schedules."""
    rows: list[SavedValue] = []
    for v in values:
        eqn = schedule.joint.producer[v]
        node = eqn.params["node"] if eqn.primitive is fork_p else None
        if node and v is eqn.outvars[-1]:
            rows += expand_token(node, schedule.inner[node])
        elif not (node and eqn.outvars[-1] in schedule.saved and _in_token(schedule, eqn, v)):
            memory = schedule.offloaded[v].dst if v in schedule.offloaded else "device"
            rows.append(
                SavedValue(
                    "kept", v.aval, _origin(schedule.joint, v), schedule.why[v], memory=memory
                )
            )
    return rows


def _in_token(schedule: Schedule, eqn: JaxprEqn, v: Var) -> bool:
    """Whether the token of a node already holds this output of the node, in the same memory."""
    node: Node = eqn.params["node"]
    if len(node.joints) != 1:
        return False
    (inner,), (joint,) = schedule.inner[node], node.joints
    invariant = set(gather(inner.saved, node.hoisted_values(inner)))
    in_token = {u for u in node.token_values(inner) if u not in invariant}
    in_token = in_token.union(gather(joint.inputs, node.stacked_inputs([inner]))).difference(
        inner.offloaded
    )
    output = joint.outputs[eqn.outvars.index(v)]
    # An output of a loop is either stacked, like the values saved inside, or the final state.
    stacked = _ndim(v) == _ndim(output) + node.loop
    return isinstance(output, Var) and output in in_token and stacked


def _ndim(v: Any) -> int:
    return len(getattr(v.aval, "shape", ()))


def _loops(node: Node) -> tuple[int, ...]:
    return (node.iterations,) if node.loop else ()


def expand_token(node: Node, schedules: Sequence[Schedule]) -> list[SavedValue]:
    """Return the values in a node's token: its residuals and the stored states of a loop."""
    if len(schedules) != 1:
        return _branches(schedules)
    (schedule,), joint = schedules, schedules[0].joint
    invariant = {
        v for v, on in zip(schedule.saved, node.hoisted_values(schedule), strict=True) if on
    }
    in_token = node.token_values(schedule)
    rows = _expand(schedule, [v for v in in_token if v in invariant])
    for r in _expand(schedule, [v for v in in_token if v not in invariant]):
        rows.append(dataclasses.replace(r, loops=(*_loops(node), *r.loops)))
    for i, n in enumerate(node.stored_states(schedules)):
        if n:
            v, output = joint.inputs[i], joint.outputs[i - node.first_carry]
            origin = _origin(joint, output) or (node.eqn, "")
            memory = schedule.offloaded[v].dst if v in schedule.offloaded else "device"
            rows.append(SavedValue("carry", v.aval, origin, state_reason(schedule), (n,), memory))
    return rows


def state_reason(schedule: Schedule) -> str:
    """Return the reason why a loop saves states, given the Schedule of its body."""
    if schedule.snapshots is None:
        return "the state of the loop in each iteration"
    return "a state of the loop, from which others are recomputed"


def _branches(schedules: Sequence[Schedule]) -> list[SavedValue]:
    """Rows for all branches of a cond. Only one branch runs, so branches share memory slots.

    A slot is a shape and a dtype. A row that uses the slot of another branch is "shared".
    """
    slots = collections.Counter[Any]()
    rows: list[SavedValue] = []
    for schedule in schedules:
        free = slots.copy()
        for row in _expand(schedule, schedule.saved):
            slot = (*row.loops, *row.aval.shape), row.aval.dtype
            reused = row.kind != "shared" and free[slot] > 0
            free[slot] -= reused
            slots[slot] += row.kind != "shared" and not reused
            rows.append(dataclasses.replace(row, kind="shared") if reused else row)
    return rows


def _origin(joint: Joint, v: Any) -> tuple[JaxprEqn, str] | None:
    """The equation that made a value, found inside calls and loops, and its `checkpoint_name`."""
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
