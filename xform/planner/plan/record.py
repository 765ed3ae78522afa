"""A Plan's decisions as plain data, and back, for the same program.

Programs are written as one line for each equation, see `xform.program.fingerprint`; decisions by
the numbers of forward values, in the order in which they are made. What is equal is written once: a
layer that is called 96 times has one program and, if it keeps the same, one decision.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xform._jax import Offloadable, Var
from xform.errors import OtherProgram
from xform.interpret.joint import Joint
from xform.interpret.node import Node, fork_p
from xform.planner.plan.decision import Decision
from xform.planner.plan.difference import difference
from xform.planner.shape import Shape
from xform.policies.budgets import Regions
from xform.program.fingerprint import listing
from xform.program.source import frame


@dataclasses.dataclass(frozen=True)
class Record:
    """Decisions for one program, as JSON has them.

    Attributes:
      programs: of each Joint, its equations as lines, its inputs and outputs.
      decisions: for each Decision, its program, the numbers of its saved values, the numbers and
        memories of its offloaded values (inputs, which are states of a loop, after all others), the
        decisions of its nodes by the place of their equation, how many states its loop stores, and
        whether a policy was asked. The last Decision is that of the whole function.
      loops: shapes of loops, by their place in the program, that are taken apart before all else.
      regions: "open" if the program is that without its remat regions.
    """

    programs: tuple[tuple[str, ...], ...]
    decisions: tuple[dict[str, Any], ...]
    loops: dict[str, Any]
    regions: Regions = "marked"

    def decision(self, joint: Joint, asked: str) -> Decision:
        """The Decision for a Joint; `OtherProgram`, with the first difference, if it is another."""
        return _Reading(self, asked).decision(len(self.decisions) - 1, joint)


def record(
    decision: Decision,
    joint: Joint,
    shapes: Mapping[int, Shape],
    regions: Regions = "marked",
) -> Record:
    """The Record of a Decision for a Joint, of a program with such loops and remat regions.

    Linear in equations.
    """
    writing = _Writing()
    writing.add(decision, joint)
    loops = {str(i): [list(part) for part in shape] for i, shape in shapes.items()}
    return Record(tuple(writing.programs), tuple(writing.decisions), loops, regions)


class _Writing:
    def __init__(self) -> None:
        self.programs: list[tuple[str, ...]] = []
        self.decisions: list[dict[str, Any]] = []
        self._programs: dict[Any, int] = {}
        self._decisions: dict[Any, int] = {}
        self._joints: dict[Joint, int] = {}

    def add(self, decision: Decision, joint: Joint) -> int:
        key = decision, joint
        if key not in self._decisions:
            if joint not in self._joints:
                self._joints[joint] = _place(self.programs, self._programs, lines(joint))
            number = _numbers(joint)
            at = {id(e): i for i, e in enumerate(joint.forward)}
            nodes = {
                str(at[id(e)]): [
                    self.add(c, j)
                    for c, j in zip(decision.inner[node], node.joints, strict=True)
                ]
                for e in joint.forward
                if e.primitive is fork_p and (node := e.params["node"]) in decision.inner
            }  # fmt: skip
            row = {
                "program": self._joints[joint],
                "saved": sorted(number[v] for v in decision.saved if v in number),
                "offloaded": {
                    str(number[v]): [decision.offloaded[v].src, decision.offloaded[v].dst]
                    for v in sorted(decision.offloaded, key=number.__getitem__)
                },
                "nodes": nodes,
                "snapshots": decision.snapshots,
                "asked": decision.asked,
            }  # fmt: skip
            # The whole function's comes last, and so is never one of another.
            self._decisions[key] = _place(self.decisions, self._decisions, row)
        return self._decisions[key]


def _place(rows: list[Any], places: dict[Any, int], row: Any) -> int:
    """Where a row stands; it is added if it is not there."""
    key = repr(row)
    if key not in places:
        places[key] = len(rows)
        rows.append(row)
    return places[key]


class _Reading:
    def __init__(self, of: Record, asked: str):
        self.of, self.asked = of, asked
        self._made: dict[tuple[int, Joint], Decision] = {}

    def decision(self, i: int, joint: Joint) -> Decision:
        if (i, joint) in self._made:
            return self._made[i, joint]
        row = self.of.decisions[i]
        self._check(self.of.programs[row["program"]], joint)
        values = [*_numbers(joint)]
        inner: dict[Node, tuple[Decision, ...]] = {}
        self._check_values(len(values) - len(joint.inputs), row["saved"])
        self._check_values(len(values), map(int, row["offloaded"]))
        for at, numbers in row["nodes"].items():
            node = self._node(joint, int(at), len(numbers))
            pairs = zip(numbers, node.joints, strict=True)
            inner[node] = tuple(self.decision(n, j) for n, j in pairs)
        decision = Decision(
            frozenset(values[n] for n in row["saved"]),
            inner,
            {values[int(n)]: Offloadable(*where) for n, where in row["offloaded"].items()},
            row["snapshots"],
            row.get("asked", False),
        )
        self._made[i, joint] = decision
        return decision

    def _check_values(self, count: int, numbers: Iterable[int]) -> None:
        for n in numbers:
            if n >= count:
                raise self._damaged(f"it keeps the value {n} of a program that makes {count}")

    def _node(self, joint: Joint, at: int, count: int) -> Node:
        eqn = joint.forward[at] if at < len(joint.forward) else None
        if eqn is None or eqn.primitive is not fork_p or len(eqn.params["node"].joints) != count:
            raise self._damaged(
                f"it has {count} decisions for equation {at}, which takes none such"
            )
        return eqn.params["node"]

    def _damaged(self, blocked: str) -> OtherProgram:
        remedy = "make a new plan with xform.plan, and keep the file as Plan.save writes it"
        return OtherProgram(self.asked, blocked, "", remedy)

    def _check(self, recorded: Sequence[str], joint: Joint) -> None:
        equations = joint.program.equations
        pairs = itertools.zip_longest(recorded, lines(joint), equations)
        for i, (then, now, eqn) in enumerate(pairs):
            if then != now:
                raise OtherProgram(
                    self.asked,
                    f"it was made for another program; they differ first at equation {i}: "
                    f"{difference(then or '', now or '')}",
                    frame(eqn) if eqn is not None else "",
                    "make a new plan with xform.plan for this function, these shapes and dtypes, "
                    "and the same argnums",
                )


def _numbers(joint: Joint) -> dict[Var, int]:
    """Forward values, numbered in the order in which they are made; the inputs come last."""
    values = [v for eqn in joint.forward for v in eqn.outvars]
    return {v: i for i, v in enumerate((*values, *joint.inputs))}


def lines(joint: Joint) -> tuple[str, ...]:
    """The equations of a Joint as text; equal for equal programs, whatever made them.

    What its program closes over is there by type: decisions do not depend on values.
    """
    ends = "derivative", joint.active, joint.seeded, joint.push
    return (*listing(joint.program), " ".join(map(str, ends)))
