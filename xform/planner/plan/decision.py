"""`Decision`: which values a derivative saves, without the order of its backward pass.

A *Joint* is the forward and the backward pass of a program as one program. Loops, branches and
calls in it are *nodes*, with Joints of their own. A *Schedule* is a full plan of a Joint: its saved
values, and its backward pass with the recomputed equations. A Decision is the saved values alone,
with the Decisions of the nodes. From it, `planner/decide.py` makes the Schedule again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from xform._jax import Offloadable, Var
from xform.interpret.joint import Schedule
from xform.interpret.node import Node


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """The saved values of one Joint, and of the Joints inside it.

    `planner/decide.py` takes it as a policy.

    Attributes:
      saved: the saved values. One of them, a node's token, stands for all values that the node
        saves. A node whose token is not saved is recomputed as a whole.
      inner: the Decisions for the Joints of each node. Remat regions and while loops may be
        missing. Then a region follows its own policy, and a while loop saves, for one step at a
        time, everything that the backward pass of the step reads.
      offloaded: the saved values that are copied to another memory, with the two memories. For the
        body of a loop, it also has the carries that are offloaded.
      snapshots: for the body of a loop, how many states the loop stores; the others are recomputed
        from these. None: the body saves its values in every iteration.
      decided_per_value: whether a policy decided about each value on its own, rather than a cut
        about all values together.
    """

    saved: frozenset[Var]
    inner: Mapping[Node, tuple[Decision, ...]]
    offloaded: Mapping[Var, Offloadable] = dataclasses.field(default_factory=dict)
    snapshots: int | None = None
    decided_per_value: bool = False


def decision_of(schedule: Schedule) -> Decision:
    """Return the decisions of a Schedule. Nodes that share a Schedule share its Decision."""
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
    """Return the decisions of a Schedule, with other decisions for some nodes.

    `change` takes a node and the Schedule of one of its programs, and returns a Decision for that
    program. If `change` returns None, it is called for the nodes inside that program.
    """
    decisions: dict[tuple[Node, Schedule], Decision] = {}

    def changed(node: Node, body: Schedule) -> Decision:
        if (node, body) not in decisions:
            decisions[node, body] = change(node, body) or edit_decision(body, change)
        return decisions[node, body]

    inner = {
        node: tuple(changed(node, body) for body in schedules)
        for node, schedules in schedule.inner.items()
    }
    original = decision_of(schedule)
    return original if inner == original.inner else dataclasses.replace(original, inner=inner)
