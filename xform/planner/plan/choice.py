"""A Plan's decisions alone: which values each Joint keeps, in a tree with the Joints' nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from xform._jax import Offloadable, Var
from xform.interpret.joint import Plan
from xform.interpret.node import Node


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """What is kept of one Joint, and of the Joints of its nodes.

    A policy for `decide.plan` that decides for a whole Joint. A node whose token is not kept is
    run again; one that is not among `inner` decides for itself. `snapshots` and `asked` are those
    of a `Plan`.
    """

    saved: frozenset[Var]
    inner: Mapping[Node, tuple[Choice, ...]]
    offloaded: Mapping[Var, Offloadable] = dataclasses.field(default_factory=dict)
    snapshots: int | None = None
    asked: bool = False


def choice_of(plan: Plan) -> Choice:
    """The decisions of a Plan; a Plan that several nodes share gives one Choice."""
    if "choice" not in plan.cache:
        inner = {node: tuple(map(choice_of, plans)) for node, plans in plan.inner.items()}
        plan.cache["choice"] = Choice(
            frozenset(plan.kept), inner, plan.offloaded, plan.snapshots, plan.asked
        )
    return plan.cache["choice"]


def edited(plan: Plan, change: Callable[[Node, Plan], Choice | None]) -> Choice:
    """The decisions of a Plan, but for what `change` decides of the programs of some nodes.

    Where it decides nothing, the programs of nodes within are asked about in turn.
    """
    choices: dict[tuple[Node, Plan], Choice] = {}

    def of(node: Node, inner: Plan) -> Choice:
        if (node, inner) not in choices:
            choices[node, inner] = change(node, inner) or edited(inner, change)
        return choices[node, inner]

    inner = {node: tuple(of(node, p) for p in plans) for node, plans in plan.inner.items()}
    same = choice_of(plan)
    return same if inner == same.inner else dataclasses.replace(same, inner=inner)
