"""Which equations of a Joint may run a second time, and the error where one has to and must not.

A *Joint* is the forward and the backward pass of a program as one program. A `fork` equation stands
for the forward pass of a loop, branch or call in it; the fork's *node* has the Joints of the
programs inside. `registry.repeatable` decides about all other equations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xform._jax import JaxprEqn
from xform.errors import NotDifferentiable
from xform.interpret.node import Node, fork_p
from xform.program.source import frame
from xform.registry import repeatable as registry
from xform.registry.repeatable import PRINTS


def repeatable(eqn: JaxprEqn) -> bool:
    """Return whether a second run of an equation gives equal results and does nothing else."""
    return not repeat_obstacles(eqn)


def repeat_obstacles(eqn: JaxprEqn) -> frozenset[str]:
    """Return the names of effects and primitives because of which an equation must not run twice.

    For a fork these are the obstacles in its node.
    """
    if eqn.primitive is fork_p:
        return node_obstacles(eqn.params["node"])
    return registry.repeat_obstacles(eqn)


def node_obstacles(node: Node) -> frozenset[str]:
    """Return the same for the forward pass of a node.

    The forward rule of a custom function may do other things than the function. So the obstacles in
    the node's Joints count too.
    """
    return registry.repeat_obstacles(node.eqn).union(*map(_obstacles_in, node.joints))


def _obstacles_in(joint: Any) -> frozenset[str]:
    """Return the same for the forward pass of a Joint. Cached on its program."""
    cache, key = joint.program.cache, "forward obstacles"
    if key not in cache:
        cache[key] = frozenset[str]().union(*map(repeat_obstacles, joint.forward))
    return cache[key]


def check_repeatable(equations: Iterable[JaxprEqn], request: str, subject: str, reason: str,
                     remedy: str) -> None:  # fmt: skip
    """Raise NotDifferentiable if one of the equations must not run twice. A print may.

    Args:
      equations: the equations that will run twice.
      request: the derivative that the user asked for.
      subject: what contains the equations, such as "its body".
      reason: why they run twice, such as "the backward pass runs the body again".
      remedy: what the user can do instead.
    """
    for eqn in equations:
        if obstacles := repeat_obstacles(eqn) - PRINTS:
            names = ", ".join(sorted(obstacles))
            raise NotDifferentiable(
                request,
                f"{subject} has effects or draws that must happen once ({names}), and {reason}",
                frame(eqn),
                remedy,
            )
