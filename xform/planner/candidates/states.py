"""Decisions under which loops that contain loops save their states only.

In the backward pass, each iteration of such a loop recomputes everything else, its inner loops
included. The values that an inner loop saves are held for one iteration of the outer loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from xform._jax import while_p
from xform.interpret.joint import Schedule
from xform.interpret.node import Node, gather
from xform.planner.decide import available_inputs, schedule
from xform.planner.loops import is_region_without_policy
from xform.planner.plan.decision import Decision, decision_of, edit_decision
from xform.policies import MinCut

# Takes a node and the Schedule of one of its programs. Returns a new Decision for that program, or
# None to apply the change to the nodes inside it.
Change = Callable[[Node, Schedule], Decision | None]


def outer_states(node: Node, current: Schedule) -> Decision | None:
    """The change that makes loops that contain loops save the states of the outer loop only."""
    if _around_loops(node, current):
        return _states(node, current, outer_states)
    return decision_of(current) if _is_closed(node) else None


def all_states(body_policy: MinCut, slots: Mapping[Node, int]) -> Change:
    """The change that makes loops inside other loops or regions follow `body_policy`.

    The loops around them save their states only. Loops in `slots` store that many states and
    nothing else.
    """

    def inner(node: Node, current: Schedule) -> Decision | None:
        if _is_closed(node):
            return decision_of(current)
        if not node.loop:
            return None
        if _around_loops(node, current):
            decision = _states(node, current, inner)
        elif node in slots:
            decision = decision_of(schedule(current.joint))
        elif node.eqn.primitive is not while_p:
            inner_schedule = schedule(current.joint, body_policy, available=available_inputs(node))
            decision = decision_of(inner_schedule)
        else:
            return None
        return dataclasses.replace(decision, snapshots=slots[node]) if node in slots else decision

    def outer(node: Node, current: Schedule) -> Decision | None:
        if node in slots or _is_closed(node) or _around_loops(node, current):
            return inner(node, current)
        return edit_decision(current, inner) if node.region else None

    return outer


def _states(node: Node, current: Schedule, change: Change) -> Decision:
    """Save the states of a loop and its loop-invariant values only; `change` its inner loops."""
    hoisted = frozenset(gather(current.saved, node.hoisted_values(current)))
    return dataclasses.replace(edit_decision(current, change), saved=hoisted, offloaded={})


def _around_loops(node: Node, current: Schedule) -> bool:
    """Whether a node is a loop that contains a loop."""
    return node.loop and len(node.joints) == 1 and _holds_loop(current)


def _holds_loop(current: Schedule) -> bool:
    """Whether the program contains a loop that a plan may decide about."""
    nodes = ((node, schedules) for node, schedules in current.inner.items() if not _is_closed(node))
    return any(node.loop or any(map(_holds_loop, schedules)) for node, schedules in nodes)


def _is_closed(node: Node) -> bool:
    """Whether a node is a remat region with a policy of its own."""
    return node.region and not is_region_without_policy(node.eqn)
