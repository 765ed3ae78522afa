"""The side effects of an equation."""

from __future__ import annotations

from typing import Any

# Effects that are no side effects: communication between devices, and a mutable reference that only
# the equation itself uses.
_LOCAL = frozenset(("NamedAxisEffect", "InternalMutableArrayEffect"))


def side_effects(eqn: Any) -> frozenset[str]:
    """Return the names of an equation's side effects, such as "IOEffect"."""
    if not eqn.effects:
        return frozenset()
    return frozenset([type(effect).__name__ for effect in eqn.effects]) - _LOCAL


def names_axis(effect: Any) -> bool:
    """Return whether an effect only records the use of a named axis."""
    return type(effect).__name__ == "NamedAxisEffect"


def uses_named_axis(eqn: Any) -> bool:
    """Return whether an equation communicates along a named axis, or reads the index along one."""
    return any(map(names_axis, eqn.effects))


def has_effects(eqn: Any) -> bool:
    """Return whether an equation has side effects."""
    return bool(side_effects(eqn))
