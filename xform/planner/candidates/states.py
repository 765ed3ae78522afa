"""Decisions by which loops that have loops inside keep their states alone.

All else in a trip of them is run again when they go back, and so are the loops inside: what those
keep lasts for one trip.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from xform._jax import while_p
from xform.interpret.joint import Schedule
from xform.interpret.node import Node, gather
from xform.planner.decide import inputs_at_hand, schedule
from xform.planner.loops import free_region
from xform.planner.plan.decision import Decision, decision_of, edited
from xform.policies import MinCut

# For a node and the Schedule of a program of its own: another decision, or None to look inside.
Change = Callable[[Node, Schedule], Decision | None]


def outer_states(node: Node, current: Schedule) -> Decision | None:
    """The change by which loops of loops keep the states of the outer one alone."""
    if _around_loops(node, current):
        return _states(node, current, outer_states)
    return decision_of(current) if _closed(node) else None


def all_states(way: MinCut, slots: Mapping[Node, int]) -> Change:
    """The change by which loops inside others, or inside regions, keep what `way` says.

    Those around them keep their states; and of some loops so many `slots` are all that is kept.
    """

    def inner(node: Node, current: Schedule) -> Decision | None:
        if _closed(node):
            return decision_of(current)
        if not node.loop:
            return None
        if _around_loops(node, current):
            decision = _states(node, current, inner)
        elif node in slots:
            decision = decision_of(schedule(current.joint))
        elif node.eqn.primitive is not while_p:
            decision = decision_of(schedule(current.joint, way, at_hand=inputs_at_hand(node)))
        else:
            return None
        return dataclasses.replace(decision, snapshots=slots[node]) if node in slots else decision

    def outer(node: Node, current: Schedule) -> Decision | None:
        if node in slots or _closed(node) or _around_loops(node, current):
            return inner(node, current)
        return edited(current, inner) if node.region else None

    return outer


def _states(node: Node, current: Schedule, change: Change) -> Decision:
    once = frozenset(gather(current.kept, node.hoisted(current)))
    return dataclasses.replace(edited(current, change), saved=once, offloaded={})


def _around_loops(node: Node, current: Schedule) -> bool:
    return node.loop and len(node.joints) == 1 and _holds_loop(current)


def _holds_loop(current: Schedule) -> bool:
    """Whether there is a loop that a plan may decide about."""
    nodes = ((node, schedules) for node, schedules in current.inner.items() if not _closed(node))
    return any(node.loop or any(map(_holds_loop, schedules)) for node, schedules in nodes)


def _closed(node: Node) -> bool:
    """Whether the author of a region said what it saves."""
    return node.region and not free_region(node.eqn)
