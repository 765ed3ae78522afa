"""The decisions of a Schedule alone: which values each Joint saves, as a tree like the Joints'."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from xform._jax import Offloadable, Var
from xform.interpret.joint import Schedule
from xform.interpret.node import Node


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """The saved values of one Joint, and of the Joints inside it.

    It is a policy for `decide.schedule` that decides for a whole Joint.

    Attributes:
      saved: the saved values. A node (loop, branch or call) whose token is not among them is
        recomputed as a whole.
      inner: the decisions for the Joints of each node. A node that is missing decides for itself.
      offloaded: the values that are offloaded, with their memories.
      snapshots: how many states a loop stores; None if it saves values in every iteration. As in
        `Schedule`.
      decided_per_value: whether a policy decided about each value, rather than a cut about all.
        As in `Schedule`.
    """

    saved: frozenset[Var]
    inner: Mapping[Node, tuple[Decision, ...]]
    offloaded: Mapping[Var, Offloadable] = dataclasses.field(default_factory=dict)
    snapshots: int | None = None
    decided_per_value: bool = False


def decision_of(schedule: Schedule) -> Decision:
    """The decisions of a Schedule. Nodes that share a Schedule share its Decision."""
    if "decision" not in schedule.cache:
        inner = {
            node: tuple(map(decision_of, schedules)) for node, schedules in schedule.inner.items()
        }
        schedule.cache["decision"] = Decision(
            frozenset(schedule.saved),
            inner,
            schedule.offloaded,
            schedule.snapshots,
            schedule.decided_per_value,
        )
    return schedule.cache["decision"]


def edit_decision(
    schedule: Schedule, change: Callable[[Node, Schedule], Decision | None]
) -> Decision:
    """The decisions of a Schedule, replaced by those of `change` for some nodes.

    `change` takes a node and the Schedule of one of its programs. If it returns None, it is called
    for the nodes inside that program.
    """
    decisions: dict[tuple[Node, Schedule], Decision] = {}

    def of(node: Node, inner: Schedule) -> Decision:
        if (node, inner) not in decisions:
            decisions[node, inner] = change(node, inner) or edit_decision(inner, change)
        return decisions[node, inner]

    inner = {
        node: tuple(of(node, p) for p in schedules) for node, schedules in schedule.inner.items()
    }
    original = decision_of(schedule)
    return original if inner == original.inner else dataclasses.replace(original, inner=inner)
