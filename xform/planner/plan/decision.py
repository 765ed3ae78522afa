"""A Plan's decisions alone: which values each Joint keeps, in a tree with the Joints' nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from xform._jax import Offloadable, Var
from xform.interpret.joint import Plan
from xform.interpret.node import Node


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What is kept of one Joint, and of the Joints of its nodes.

    A policy for `decide.plan` that decides for a whole Joint. A node whose token is not kept is
    run again; one that is not among `inner` decides for itself. `snapshots` and `asked` are those
    of a `Plan`.
    """

    saved: frozenset[Var]
    inner: Mapping[Node, tuple[Decision, ...]]
    offloaded: Mapping[Var, Offloadable] = dataclasses.field(default_factory=dict)
    snapshots: int | None = None
    asked: bool = False


def decision_of(plan: Plan) -> Decision:
    """The decisions of a Plan; a Plan that several nodes share gives one Decision."""
    if "decision" not in plan.cache:
        inner = {node: tuple(map(decision_of, plans)) for node, plans in plan.inner.items()}
        plan.cache["decision"] = Decision(
            frozenset(plan.kept), inner, plan.offloaded, plan.snapshots, plan.asked
        )
    return plan.cache["decision"]


def edited(plan: Plan, change: Callable[[Node, Plan], Decision | None]) -> Decision:
    """The decisions of a Plan, but for what `change` decides of the programs of some nodes.

    Where it decides nothing, the programs of nodes within are asked about in turn.
    """
    decisions: dict[tuple[Node, Plan], Decision] = {}

    def of(node: Node, inner: Plan) -> Decision:
        if (node, inner) not in decisions:
            decisions[node, inner] = change(node, inner) or edited(inner, change)
        return decisions[node, inner]

    inner = {node: tuple(of(node, p) for p in plans) for node, plans in plan.inner.items()}
    same = decision_of(plan)
    return same if inner == same.inner else dataclasses.replace(same, inner=inner)
