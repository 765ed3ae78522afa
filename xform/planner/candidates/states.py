"""Change decisions so that loops around other loops save their states (carries) only.

In the backward pass, each iteration of such a loop recomputes everything else, its inner loops
included. The values that an inner loop saves are held for one iteration of the outer loop.

A *Schedule* is the plan of one program: its saved values, and the order of its backward pass. A
`Decision` is the saved values alone. A *node* of a program is a loop, a call, or a remat region (a
part that `jax.checkpoint` marks); the program inside has a Schedule of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from xform.interpret.joint import Schedule
from xform.interpret.node import Node, gather
from xform.planner.decide import available_values, schedule
from xform.planner.loops import is_region_without_policy
from xform.planner.plan.decision import Decision, decision_of, edit_decision
from xform.policies import MinCut

# A change for `edit_decision`. Takes a node and the Schedule of one of its programs. Returns a new
# Decision for that program, or None to apply the change to the nodes inside it.
Change = Callable[[Node, Schedule], Decision | None]


def outer_states(node: Node, current: Schedule) -> Decision | None:
    """Make loops that contain loops save their states only. This is a Change.

    Remat regions with a policy of their own are not changed.
    """
    if _contains_loops(node, current):
        return _save_states(node, current, outer_states)
    return decision_of(current) if _is_closed(node) else None


def all_states(body_policy: MinCut, slots: Mapping[Node, int]) -> Change:
    """Return the Change that makes loops inside other loops or regions follow `body_policy`.

    The loops around them save their states only. `slots` maps some loops to a number: such a loop
    stores that many states and nothing else.
    """

    def change_inside(node: Node, current: Schedule) -> Decision | None:
        """Change a node inside a loop or region."""
        if _is_closed(node):
            return decision_of(current)
        if not node.loop:
            return None
        if _contains_loops(node, current):
            decision = _save_states(node, current, change_inside)
        elif node in slots:
            decision = decision_of(schedule(current.joint))
        elif not node.unknown_length:
            inner_schedule = schedule(current.joint, body_policy, available=available_values(node))
            decision = decision_of(inner_schedule)
        else:
            return None
        return dataclasses.replace(decision, snapshots=slots[node]) if node in slots else decision

    def change(node: Node, current: Schedule) -> Decision | None:
        if node in slots or _is_closed(node) or _contains_loops(node, current):
            return change_inside(node, current)
        return edit_decision(current, change_inside) if node.region else None

    return change


def _save_states(node: Node, current: Schedule, change: Change) -> Decision:
    """Save only a loop's states and loop-invariant values. Apply `change` to its inner loops."""
    invariant = frozenset(gather(current.saved, node.hoisted_values(current)))
    return dataclasses.replace(edit_decision(current, change), saved=invariant, offloaded={})


def _contains_loops(node: Node, current: Schedule) -> bool:
    """Return whether a node is a loop that contains a loop. `current` is its body's Schedule."""
    return node.loop and len(node.joints) == 1 and _holds_loop(current)


def _holds_loop(current: Schedule) -> bool:
    """Return whether a program contains a loop that a plan may decide about."""
    nodes = ((node, schedules) for node, schedules in current.inner.items() if not _is_closed(node))
    return any(node.loop or any(map(_holds_loop, schedules)) for node, schedules in nodes)


def _is_closed(node: Node) -> bool:
    """Return whether a node is a remat region with a policy of its own, which holds in any plan."""
    return node.region and not is_region_without_policy(node.eqn)
