"""A Plan's decisions alone: which values each Joint keeps, in a tree with the Joints' nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from xform._jax import Offloadable, Var
from xform.interpret.joint import Plan
from xform.interpret.node import Node


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """What is kept of one Joint, and of the Joints of its nodes.

    A policy for `saved.plan` that decides for a whole Joint. A node whose token is not kept is run
    again; one that is not among `inner` decides for itself. `slots` are those of a `Plan`.
    """

    saved: frozenset[Var]
    inner: Mapping[Node, tuple[Choice, ...]]
    offloaded: Mapping[Var, Offloadable] = dataclasses.field(default_factory=dict)
    slots: int | None = None


def choice_of(how: Plan) -> Choice:
    """The decisions of a Plan; a Plan that several nodes share gives one Choice."""
    if "choice" not in how.cache:
        inner = {node: tuple(map(choice_of, plans)) for node, plans in how.inner.items()}
        how.cache["choice"] = Choice(frozenset(how.kept), inner, how.offloaded, how.slots)
    return how.cache["choice"]
