"""A Schedule's decisions alone: which values each Joint keeps, in a tree with the Joints' nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from xform._jax import Offloadable, Var
from xform.interpret.joint import Schedule
from xform.interpret.node import Node


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What is kept of one Joint, and of the Joints of its nodes.

    A policy for `decide.schedule` that decides for a whole Joint. A node whose token is not kept is
    run again; one that is not among `inner` decides for itself. `snapshots` and `asked` are those
    of a `Schedule`.
    """

    saved: frozenset[Var]
    inner: Mapping[Node, tuple[Decision, ...]]
    offloaded: Mapping[Var, Offloadable] = dataclasses.field(default_factory=dict)
    snapshots: int | None = None
    asked: bool = False


def decision_of(schedule: Schedule) -> Decision:
    """The decisions of a Schedule; a Schedule that several nodes share gives one Decision."""
    if "decision" not in schedule.cache:
        inner = {
            node: tuple(map(decision_of, schedules)) for node, schedules in schedule.inner.items()
        }
        schedule.cache["decision"] = Decision(
            frozenset(schedule.kept), inner, schedule.offloaded, schedule.snapshots, schedule.asked
        )
    return schedule.cache["decision"]


def edited(schedule: Schedule, change: Callable[[Node, Schedule], Decision | None]) -> Decision:
    """The decisions of a Schedule, but for what `change` decides of the programs of some nodes.

    Where it decides nothing, the programs of nodes within are asked about in turn.
    """
    decisions: dict[tuple[Node, Schedule], Decision] = {}

    def of(node: Node, inner: Schedule) -> Decision:
        if (node, inner) not in decisions:
            decisions[node, inner] = change(node, inner) or edited(inner, change)
        return decisions[node, inner]

    inner = {
        node: tuple(of(node, p) for p in schedules) for node, schedules in schedule.inner.items()
    }
    same = decision_of(schedule)
    return same if inner == same.inner else dataclasses.replace(same, inner=inner)
