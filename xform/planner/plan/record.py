"""A Plan's decisions as plain data, and back, for the same program.

Programs are written as one line for each equation, see `xform.fingerprint`; decisions by the
numbers of forward values, in the order in which they are made. What is equal is written once: a
layer that is called 96 times has one program and, if it keeps the same, one choice.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xform._jax import Offloadable, Var
from xform.budgets import Regions
from xform.errors import OtherProgram
from xform.fingerprint import listing
from xform.interpret.joint import Joint
from xform.interpret.node import Node, fork_p
from xform.planner.plan.choice import Choice
from xform.planner.plan.difference import difference
from xform.planner.shape import Shape
from xform.source import frame


@dataclasses.dataclass(frozen=True)
class Record:
    """Decisions for one program, as JSON has them.

    Attributes:
      programs: of each Joint, its equations as lines, its inputs and outputs.
      choices: of each Choice, its program, the numbers of the values that it saves, those that it
        offloads with their memories (inputs, which are states of a loop, after all others), the
        choices of its nodes by the place of their equation, how many states its loop stores, and
        whether a policy was asked.
        The last one is that of the whole function.
      loops: shapes of loops, by their place in the program, that are taken apart before all else.
      regions: "open" if the program is that without its remat regions.
    """

    programs: tuple[tuple[str, ...], ...]
    choices: tuple[dict[str, Any], ...]
    loops: dict[str, Any]
    regions: Regions = "marked"

    def choice(self, joint: Joint, asked: str) -> Choice:
        """The Choice for a Joint; `OtherProgram`, with the first difference, if it is another."""
        return _Reading(self, asked).choice(len(self.choices) - 1, joint)


def record(choice: Choice, joint: Joint, shapes: Mapping[int, Shape], regions: Regions = "marked"
           ) -> Record:  # fmt: skip
    """The Record of a Choice for a Joint, of a program with such loops and remat regions.

    Linear in equations.
    """
    writing = _Writing()
    writing.add(choice, joint)
    loops = {str(i): [list(part) for part in shape] for i, shape in shapes.items()}
    return Record(tuple(writing.programs), tuple(writing.choices), loops, regions)


class _Writing:
    def __init__(self) -> None:
        self.programs: list[tuple[str, ...]] = []
        self.choices: list[dict[str, Any]] = []
        self._programs: dict[Any, int] = {}
        self._choices: dict[Any, int] = {}
        self._joints: dict[Joint, int] = {}

    def add(self, choice: Choice, joint: Joint) -> int:
        key = choice, joint
        if key not in self._choices:
            if joint not in self._joints:
                self._joints[joint] = _place(self.programs, self._programs, lines(joint))
            number = _numbers(joint)
            at = {id(e): i for i, e in enumerate(joint.forward)}
            nodes = {
                str(at[id(e)]): [
                    self.add(c, j)
                    for c, j in zip(choice.inner[node], node.joints, strict=True)
                ]
                for e in joint.forward
                if e.primitive is fork_p and (node := e.params["node"]) in choice.inner
            }  # fmt: skip
            row = {
                "program": self._joints[joint],
                "saved": sorted(number[v] for v in choice.saved if v in number),
                "offloaded": {
                    str(number[v]): [choice.offloaded[v].src, choice.offloaded[v].dst]
                    for v in sorted(choice.offloaded, key=number.__getitem__)
                },
                "nodes": nodes,
                "snapshots": choice.snapshots,
                "asked": choice.asked,
            }  # fmt: skip
            # The whole function's comes last, and so is never one of another.
            self._choices[key] = _place(self.choices, self._choices, row)
        return self._choices[key]


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
        self._made: dict[tuple[int, Joint], Choice] = {}

    def choice(self, i: int, joint: Joint) -> Choice:
        if (i, joint) in self._made:
            return self._made[i, joint]
        row = self.of.choices[i]
        self._check(self.of.programs[row["program"]], joint)
        values = [*_numbers(joint)]
        inner: dict[Node, tuple[Choice, ...]] = {}
        self._check_values(len(values) - len(joint.inputs), row["saved"])
        self._check_values(len(values), map(int, row["offloaded"]))
        for at, numbers in row["nodes"].items():
            node = self._node(joint, int(at), len(numbers))
            pairs = zip(numbers, node.joints, strict=True)
            inner[node] = tuple(self.choice(n, j) for n, j in pairs)
        choice = Choice(
            frozenset(values[n] for n in row["saved"]),
            inner,
            {values[int(n)]: Offloadable(*where) for n, where in row["offloaded"].items()},
            row["snapshots"],
            row.get("asked", False),
        )
        self._made[i, joint] = choice
        return choice

    def _check_values(self, count: int, numbers: Iterable[int]) -> None:
        for n in numbers:
            if n >= count:
                raise self._damaged(f"it keeps the value {n} of a program that makes {count}")

    def _node(self, joint: Joint, at: int, count: int) -> Node:
        eqn = joint.forward[at] if at < len(joint.forward) else None
        if eqn is None or eqn.primitive is not fork_p or len(eqn.params["node"].joints) != count:
            raise self._damaged(f"it has {count} choices for equation {at}, which takes none such")
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
