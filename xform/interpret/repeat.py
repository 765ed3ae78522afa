"""Which equations of a Joint may run a second time, and the error where one has to and must not.

A *Joint* is the forward and the backward pass of a program as one program. A `fork` equation stands
for the forward pass of a loop, branch or call in it; the fork's *node* has the Joints of the
programs inside. `registry.repeatable` asks this file about a fork, and decides about all other
equations itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xform._jax import JaxprEqn
from xform.errors import NotDifferentiable
from xform.interpret.node import Node, fork_p
from xform.program.source import frame
from xform.registry.repeatable import PRINTS, declare_obstacles, repeat_obstacles


def node_obstacles(node: Node) -> frozenset[str]:
    """Return the effects and primitives that forbid to run a node twice, by name.

    They are those of its forward pass. The forward rule of a custom function may do other things
    than the function. So the obstacles in the node's Joints count too.
    """
    return repeat_obstacles(node.eqn).union(*map(_obstacles_in, node.joints))


def _obstacles_in(joint: Any) -> frozenset[str]:
    """Return the same for the forward pass of a Joint. Cached on its program."""
    cache, key = joint.program.cache, "forward obstacles"
    if key not in cache:
        cache[key] = frozenset[str]().union(*map(repeat_obstacles, joint.forward))
    return cache[key]


declare_obstacles(fork_p, lambda eqn: node_obstacles(eqn.params["node"]))


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
