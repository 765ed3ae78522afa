"""Convert a Plan's decisions to plain data, and back for the same program.

A *Joint* is the forward and the backward pass of a program as one program. Loops, branches and
calls in it are *nodes*, with Joints of their own. A `Decision` says which forward values a Joint
saves, and has a Decision for each Joint inside. A Decision refers to Python objects, which exist in
one process only. A `Record` holds the same decisions in types that JSON has.

In a Record a Joint is a list of texts, one for each equation (see `xform.program.fingerprint`).
Decisions refer to forward values by number, in the order of their computation. Equal programs and
equal decisions are written once: a layer that is called 96 times has one program and, if it always
saves the same values, one decision.
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
from xform.planner.plan.stored import check_record
from xform.planner.shape import Shape
from xform.policies.budgets import Regions
from xform.program.fingerprint import listing
from xform.program.source import frame


@dataclasses.dataclass(frozen=True)
class Record:
    """Decisions for one program, in types that JSON has.

    Attributes:
      programs: for each Joint, its equations, inputs and outputs as lines of text.
      decisions: one dict for each Decision. The last one is that of the whole function. The keys:
        "program", the index of its program in `programs`;
        "saved", the numbers of the saved values;
        "offloaded", the two memories of each offloaded value, by the value's number (inputs, such
        as the states of a loop, are numbered after all other values);
        "nodes", the indices in `decisions` of each node's decisions, by the index of the node's
        equation;
        "snapshots", how many states the loop stores whose body this is, or None; and
        "asked", whether a policy decided about each value on its own.
      loops: the new shapes of loops that are split or nested, by their index in the program. The
        decisions are for the program with these new loops.
      regions: "open" if remat regions are dissolved in the program.
      slices: the regions that run in slices: the numbers of a `SlicedValue` for each.
    """

    programs: tuple[tuple[str, ...], ...]
    decisions: tuple[dict[str, Any], ...]
    loops: dict[str, Any]
    regions: Regions = "marked"
    slices: tuple[tuple[int | None, ...], ...] = ()

    def check_stored(self, place: str) -> None:
        """Check a Record that was read from a file; `place` names it in the ValueError."""
        check_record(self, place)

    def decision(self, joint: Joint, plan_text: str) -> Decision:
        """Return the Decision for a Joint; `plan_text` names the plan in errors.

        Raises:
          OtherProgram: the Joint is not the recorded one. The message has the first difference.
        """
        return _RecordReader(self, plan_text).decision(len(self.decisions) - 1, joint)


def record(
    decision: Decision,
    joint: Joint,
    shapes: Mapping[int, Shape],
    regions: Regions = "marked",
    slices: Sequence[Sequence[int | None]] = (),
) -> Record:
    """Return the Record of a Decision for a Joint.

    `shapes`, `regions` and `slices` say how the program's loops, its remat regions (the parts that
    `jax.checkpoint` marks) and other regions were changed before the Joint was made.

    Cost: linear in the number of equations.
    """
    writer = _RecordWriter()
    writer.add(decision, joint)
    loops = {str(i): [list(part) for part in shape] for i, shape in shapes.items()}
    return Record(tuple(writer.programs), tuple(writer.decisions), loops, regions,
                  tuple(map(tuple, slices)))  # fmt: skip


class _RecordWriter:
    """Collects the programs and decisions of a Record, each distinct one once.

    Attributes:
      programs: the texts of the programs so far.
      decisions: the dicts of the decisions so far.
    """

    def __init__(self) -> None:
        self.programs: list[tuple[str, ...]] = []
        self.decisions: list[dict[str, Any]] = []
        # Indices in these lists: by text, and by object to save time.
        self._index_of_program: dict[Any, int] = {}
        self._index_of_decision: dict[Any, int] = {}
        self._index_of_joint: dict[Joint, int] = {}

    def add(self, decision: Decision, joint: Joint) -> int:
        """Add a Decision for a Joint, and those inside it; return its index in `decisions`."""
        key = decision, joint
        if key not in self._index_of_decision:
            if joint not in self._index_of_joint:
                index = _index_of(self.programs, self._index_of_program, lines(joint))
                self._index_of_joint[joint] = index
            number = _numbers(joint)
            positions = {id(e): i for i, e in enumerate(joint.forward)}
            nodes = {
                str(positions[id(e)]): [
                    self.add(c, j)
                    for c, j in zip(decision.inner[node], node.joints, strict=True)
                ]
                for e in joint.forward
                if e.primitive is fork_p and (node := e.params["node"]) in decision.inner
            }  # fmt: skip
            row = {
                "program": self._index_of_joint[joint],
                "saved": sorted(number[v] for v in decision.saved if v in number),
                "offloaded": {
                    str(number[v]): [decision.offloaded[v].src, decision.offloaded[v].dst]
                    for v in sorted(decision.offloaded, key=number.__getitem__)
                },
                "nodes": nodes,
                "snapshots": decision.snapshots,
                "asked": decision.decided_per_value,
            }  # fmt: skip
            # Inner decisions are added first, so the last one is that of the whole function.
            self._index_of_decision[key] = _index_of(self.decisions, self._index_of_decision, row)
        return self._index_of_decision[key]


def _index_of(rows: list[Any], indices: dict[Any, int], row: Any) -> int:
    """Return the index of a row in `rows`; append a new row. `indices` has the index by text."""
    key = repr(row)
    if key not in indices:
        indices[key] = len(rows)
        rows.append(row)
    return indices[key]


class _RecordReader:
    """Turns the dicts of a Record into Decisions, and checks that the programs match.

    `plan_text` names the plan in errors.
    """

    def __init__(self, record: Record, plan_text: str):
        self.record, self.plan_text = record, plan_text
        self._cache: dict[tuple[int, Joint], Decision] = {}

    def decision(self, i: int, joint: Joint) -> Decision:
        """Return the Decision number `i` of the Record, for the values of a Joint."""
        if (i, joint) in self._cache:
            return self._cache[i, joint]
        row = self.record.decisions[i]
        self._check_program(self.record.programs[row["program"]], joint)
        values = [*_numbers(joint)]
        inner: dict[Node, tuple[Decision, ...]] = {}
        self._check_values(len(values) - len(joint.inputs), row["saved"])
        self._check_values(len(values), map(int, row["offloaded"]))
        for index, decision_indices in row["nodes"].items():
            node = self._node(joint, int(index), len(decision_indices))
            pairs = zip(decision_indices, node.joints, strict=True)
            inner[node] = tuple(self.decision(n, j) for n, j in pairs)
        decision = Decision(
            frozenset(values[n] for n in row["saved"]),
            inner,
            {values[int(n)]: Offloadable(*memories) for n, memories in row["offloaded"].items()},
            row["snapshots"],
            row.get("asked", False),
        )
        self._cache[i, joint] = decision
        return decision

    def _check_values(self, count: int, numbers: Iterable[int]) -> None:
        """Check that the numbers of values are below `count`."""
        for n in numbers:
            if n >= count:
                raise self._damage_error(f"it saves value {n}, but the program has {count} values")

    def _node(self, joint: Joint, index: int, count: int) -> Node:
        """Return the node of forward equation `index`. It must contain `count` programs."""
        eqn = joint.forward[index] if index < len(joint.forward) else None
        if eqn is None or eqn.primitive is not fork_p or len(eqn.params["node"].joints) != count:
            raise self._damage_error(
                f"it has decisions for {count} loop bodies, branches or called functions in "
                f"equation {index}, which does not contain as many"
            )
        return eqn.params["node"]

    def _damage_error(self, problem: str) -> OtherProgram:
        """Return the error for a Record that contradicts itself, as after an edit of its file."""
        remedy = "make a new plan with xform.plan, and do not edit the file that Plan.save writes"
        return OtherProgram(self.plan_text, problem, "", remedy)

    def _check_program(self, recorded: Sequence[str], joint: Joint) -> None:
        """Check that a Joint has the recorded text."""
        equations = joint.program.equations
        pairs = itertools.zip_longest(recorded, lines(joint), equations)
        for i, (old, new, eqn) in enumerate(pairs):
            if old != new:
                raise OtherProgram(
                    self.plan_text,
                    f"it was made for another program; the first difference is at equation {i}: "
                    f"{difference(old or '', new or '')}",
                    frame(eqn) if eqn is not None else "",
                    "make a new plan with xform.plan for this function, these shapes and dtypes, "
                    "and the same argnums",
                )


def _numbers(joint: Joint) -> dict[Var, int]:
    """Return the number of each forward value, in the order of computation, then of each input."""
    values = [v for eqn in joint.forward for v in eqn.outvars]
    return {v: i for i, v in enumerate((*values, *joint.inputs))}


def lines(joint: Joint) -> tuple[str, ...]:
    """Return the equations of a Joint as text. Equal programs have equal text.

    The last line says which inputs and outputs are differentiated. Captured constants appear by
    type only, because decisions do not depend on their values. Nor do they depend on the rules of
    custom functions, whose derivatives are in the Joint.
    """
    derivative = "derivative", joint.active, joint.seeded, joint.push
    return (*listing(joint.program, rules=False), " ".join(map(str, derivative)))
