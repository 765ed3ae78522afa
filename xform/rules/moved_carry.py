"""Carries that a loop only moves between devices, such as the keys and values of ring attention.

Each iteration of such a loop sends a part of its carry around a ring with `lax.ppermute`, and
changes nothing in it. A stack of this carry over all iterations would be the whole array that the
devices share, on each device. The backward pass needs no stack: it begins with the last carry, and
moves it back by the inverse permutation, one iteration at a time. This is the communication of the
forward pass once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jax import lax

from xform._jax import JaxprEqn, Var, ppermute_p
from xform.program.arithmetic import Value
from xform.program.ir import Atom


def moved_carries(
    carries: Iterable[tuple[Var, Atom]], producer: Mapping[Var, JaxprEqn]
) -> dict[Var, JaxprEqn]:
    """Return the carries that a loop's body only moves, each with the equation that moves it.

    Args:
      carries: each carry before and after an iteration.
      producer: the equation that computes each value of the body.
    """
    pairs = ((v, producer.get(after)) for v, after in carries if isinstance(after, Var))
    return {v: eqn for v, eqn in pairs if eqn is not None and _moves(eqn, v)}


def move_back(eqn: JaxprEqn, x: Value) -> Value:
    """Move a carry back to the devices that had it before the equation `eqn` moved it."""
    inverse = [(target, source) for source, target in eqn.params["perm"]]
    return lax.ppermute(x, eqn.params["axis_name"], inverse)


def _moves(eqn: JaxprEqn, v: Var) -> bool:
    """Return whether an equation moves `v`, and no device gets or loses data."""
    if eqn.primitive is not ppermute_p or eqn.invars[0] is not v:
        return False
    sources, targets = zip(*eqn.params["perm"], strict=True) if eqn.params["perm"] else ((), ())
    devices = [*range(lax.axis_size(eqn.params["axis_name"]))]
    return sorted(sources) == devices == sorted(targets)
