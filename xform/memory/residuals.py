"""What a Plan keeps for the second part, as a table: the answer to "which values do I store?".

The walk follows the Plan: a token among the kept values stands for what its loop, call or branch
keeps, once per trip. A value that is both kept inside a call or loop and one of its outputs is one
buffer, and is listed once, where it was made.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var, frame
from xform.interpret.joint import Joint, Plan
from xform.interpret.node import Node, fork_p, gather
from xform.memory.table import columns, human_bytes
from xform.planner.cost import aval_bytes


@dataclasses.dataclass(frozen=True)
class Residual:
    """One value that waits for the backward pass.

    Attributes:
      kind: "kept" (computed and saved), "carry" (a loop's state, saved at the start of each trip),
        "shared" (kept by one branch of a cond in memory that a row of another branch counts), or
        "argument" (an input that is read where it is; nothing is allocated for it).
      type: shape and dtype in one trip, as JAX writes them: `float32[4,8]`.
      shape: of the value in one trip.
      dtype: its dtype.
      trip_bytes: bytes of one trip, over all devices.
      loops: trip counts of the loops that stack it, outermost first; empty outside loops.
      operation: the primitive that made it; for an argument, which one it is.
      name: the name that `checkpoint_name` gave it, or "".
      where: the user's line that made it, `file:line (function)`, inside loop bodies and calls.
      why: why it is kept.
      memory: "device", or the memory it is offloaded to.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    trip_bytes: int
    operation: str
    where: str
    why: str
    loops: tuple[int, ...] = ()
    name: str = ""
    memory: str = "device"

    @property
    def type(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def trips(self) -> int:
        """How many times it is stored: the product of `loops`."""
        return math.prod(self.loops)

    @property
    def total_bytes(self) -> int:
        """Bytes of all trips."""
        return self.trip_bytes * self.trips

    def to_dict(self) -> dict[str, Any]:
        """The fields and totals as plain data."""
        return {**dataclasses.asdict(self), "trips": self.trips, "total_bytes": self.total_bytes}


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What a backward pass keeps: rows by falling size, arguments last. Prints as a table.

    Attributes:
      title: the function and its policy.
      rows: one for each value.
    """

    title: str
    rows: tuple[Residual, ...]

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total_bytes(self) -> int:
        """Bytes kept beside the arguments."""
        return sum(r.total_bytes for r in self.rows if r.kind in ("kept", "carry"))

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments that the backward pass reads where they are."""
        return sum(r.total_bytes for r in self.rows if r.kind == "argument")

    def to_dict(self) -> dict[str, Any]:
        """Title, totals and rows as plain data."""
        return {
            "title": self.title,
            "total_bytes": self.total_bytes,
            "argument_bytes": self.argument_bytes,
            "rows": [r.to_dict() for r in self.rows],
        }

    def __str__(self) -> str:
        head = ["bytes", "values", "trips", "per trip", "type", "kind", "operation", "where", "why"]
        # Equal rows, as of the layers of an unrolled model, are one line.
        lines = [head, *(_line(r, n) for r, n in collections.Counter(self.rows).items())]
        total = f"{human_bytes(self.total_bytes)} kept"
        read = f"{human_bytes(self.argument_bytes)} of arguments read where they are"
        return f"{self.title}\n{columns(lines, right=(0, 1, 2, 3))}\n{total}, {read}"


def _line(r: Residual, count: int) -> list[str]:
    path, line, rest = r.where.rpartition(".py:")
    near = os.path.relpath(path) if path and not path.startswith("<") else path
    where = min(path, near, key=len) + line + rest
    return [
        human_bytes(r.total_bytes * count),
        str(count),
        " x ".join(map(str, r.loops)),
        human_bytes(r.trip_bytes) if r.loops else "",
        r.type,
        r.kind if r.memory == "device" else f"{r.kind} in {r.memory}",
        f"{r.operation} '{r.name}'" if r.name else r.operation,
        where,
        r.why,
    ]


def residuals_of(plan: Plan, inputs: Sequence[str], title: str) -> Residuals:
    """The Residuals of a whole function's Plan; `inputs` names the inputs of its program."""
    named = gather(list(zip(plan.joint.inputs, inputs, strict=True)), plan.reads)
    arguments = [
        _row("argument", v.aval, operation=name, why="the backward pass reads it")
        for v, name in named
    ]
    size = lambda row: -row.total_bytes
    return Residuals(
        title, (*sorted(_kept(plan, plan.kept), key=size), *sorted(arguments, key=size))
    )


def _kept(plan: Plan, values: Sequence[Var]) -> list[Residual]:
    """Rows for some of the values that a Plan keeps; for a token, those of its nested Plans."""
    rows: list[Residual] = []
    for v in values:
        eqn = plan.joint.producer[v]
        node = eqn.params["node"] if eqn.primitive is fork_p else None
        if node and v is eqn.outvars[-1]:
            rows += _token(node, plan.inner[node])
        elif not (node and eqn.outvars[-1] in plan.kept and _inside(plan, eqn, v)):
            memory = plan.offloaded[v].dst if v in plan.offloaded else "device"
            rows.append(_row("kept", v.aval, _origin(plan.joint, v), plan.why[v], memory=memory))
    return rows


def _inside(plan: Plan, eqn: JaxprEqn, v: Var) -> bool:
    """Whether an output of a node is, in the same memory, among what its token holds."""
    node: Node = eqn.params["node"]
    if len(node.joints) != 1:
        return False
    (inner,), (joint,) = plan.inner[node], node.joints
    held = {u for u, once in zip(inner.kept, node.hoisted(inner), strict=True) if not once}
    held = held.difference(inner.offloaded).union(gather(joint.inputs, node.stacked([inner])))
    made = joint.outputs[eqn.outvars.index(v)]
    # An output of a loop is either stacked like what is kept inside it, or its last state.
    stacked = _ndim(v) == _ndim(made) + node.loop
    return isinstance(made, Var) and made in held and stacked


def _ndim(v: Any) -> int:
    return len(v.aval.shape)


def _loops(node: Node) -> tuple[int, ...]:
    return (node.trips,) if node.loop else ()


def _token(node: Node, plans: Sequence[Plan]) -> list[Residual]:
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
            v, made = joint.inputs[i], joint.outputs[i - node.first_carry]
            origin = _origin(joint, made) or (node.eqn, "")
            row = _row("carry", v.aval, origin, "the state of the loop in each trip")
            rows.append(dataclasses.replace(row, loops=(n,)))
    return rows


def _branches(plans: Sequence[Plan]) -> list[Residual]:
    """Rows of all branches of a cond: as one branch runs, a slot of memory serves each of them."""
    slots = collections.Counter[Any]()
    rows: list[Residual] = []
    for plan in plans:
        free = slots.copy()
        for row in _kept(plan, plan.kept):
            slot = (*row.loops, *row.shape), row.dtype
            taken = row.kind != "shared" and free[slot] > 0
            free[slot] -= taken
            slots[slot] += row.kind != "shared" and not taken
            rows.append(dataclasses.replace(row, kind="shared") if taken else row)
    return rows


def _origin(joint: Joint, v: Any) -> tuple[JaxprEqn, str] | None:
    """The equation that made a value, inside the calls and loops it came through, and its name."""
    name = ""
    found = None
    while isinstance(v, Var) and (eqn := joint.producer.get(v)) is not None:
        found = eqn
        if eqn.primitive.name == "name":
            name, v = name or eqn.params["name"], eqn.invars[0]
        elif eqn.primitive is fork_p and len(eqn.params["node"].joints) == 1:
            (joint,), at = eqn.params["node"].joints, eqn.outvars.index(v)
            v = joint.outputs[at]
        else:
            break
    return (found, name) if found else None


def _row(kind: str, aval: Any, origin: tuple[JaxprEqn, str] | None = None, why: str = "",
         operation: str = "", memory: str = "device") -> Residual:  # fmt: skip
    eqn, name = origin or (None, "")
    if eqn is not None:
        prim = eqn.params["node"].eqn if eqn.primitive is fork_p else eqn
        operation = prim.primitive.name
        if operation == "jit":
            operation = f"jit({prim.params['name']})"
    return Residual(
        kind=kind,
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        trip_bytes=aval_bytes(aval),
        operation=operation,
        where=frame(eqn) if eqn is not None else "",
        why=why,
        name=name,
        memory=memory,
    )
