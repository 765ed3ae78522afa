"""What a Plan holds for the backward part, value by value.

The walk follows the Plan: a token among the kept values stands for what its loop, call or branch
keeps, once per trip. A value that is both kept inside a call or loop and one of its outputs is one
buffer, and is listed once, where it was made.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var, name_p
from xform.cost import aval_bytes
from xform.interpret.joint import Joint, Plan
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


def held(plan: Plan) -> list[Held]:
    """All that a Plan holds. Linear in its kept values, those of nested Plans included."""
    return _kept(plan, plan.kept)


def held_bytes(values: Iterable[Held]) -> int:
    """Bytes on the device of values that are held together."""
    return sum(v.total_bytes for v in values if v.memory == "device")


def _kept(plan: Plan, values: Sequence[Var]) -> list[Held]:
    """Some of the values that a Plan keeps; for a token, those of its nested Plans."""
    rows: list[Held] = []
    for v in values:
        eqn = plan.joint.producer[v]
        node = eqn.params["node"] if eqn.primitive is fork_p else None
        if node and v is eqn.outvars[-1]:
            rows += token(node, plan.inner[node])
        elif not (node and eqn.outvars[-1] in plan.kept and _inside(plan, eqn, v)):
            memory = plan.offloaded[v].dst if v in plan.offloaded else "device"
            rows.append(Held("kept", v.aval, _origin(plan.joint, v), plan.why[v], memory=memory))
    return rows


def _inside(plan: Plan, eqn: JaxprEqn, v: Var) -> bool:
    """Whether an output of a node is, in the same memory, among what its token holds."""
    node: Node = eqn.params["node"]
    if len(node.joints) != 1:
        return False
    (inner,), (joint,) = plan.inner[node], node.joints
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


def token(node: Node, plans: Sequence[Plan]) -> list[Held]:
    """What a node's token holds."""
    if len(plans) != 1:
        return _branches(plans)
    (plan,), joint = plans, plans[0].joint
    once = {v for v, on in zip(plan.kept, node.hoisted(plan), strict=True) if on}
    held = node.keeps(plan)
    rows = _kept(plan, [v for v in held if v in once])
    for r in _kept(plan, [v for v in held if v not in once]):
        rows.append(dataclasses.replace(r, loops=(*_loops(node), *r.loops)))
    for i, n in enumerate(node.copies(plans)):
        if n:
            v, output = joint.inputs[i], joint.outputs[i - node.first_carry]
            origin = _origin(joint, output) or (node.eqn, "")
            memory = plan.offloaded[v].dst if v in plan.offloaded else "device"
            rows.append(Held("carry", v.aval, origin, state_why(plan), (n,), memory))
    return rows


def state_why(plan: Plan) -> str:
    """Why a loop with such a Plan of its body keeps states."""
    if plan.snapshots is None:
        return "the state of the loop in each trip"
    return "a state of the loop, to run it again from"


def _branches(plans: Sequence[Plan]) -> list[Held]:
    """Rows of all branches of a cond: as one branch runs, a slot of memory serves each of them."""
    slots = collections.Counter[Any]()
    rows: list[Held] = []
    for plan in plans:
        free = slots.copy()
        for row in _kept(plan, plan.kept):
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
