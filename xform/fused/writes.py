"""Order the writes of a layer's new parameter and optimizer state into their stacks.

XLA overwrites a layer of a stack in place only if nothing reads the old layer afterwards. XLA also
computes a value twice if two results need it. For example, the new parameter of Adam needs the new
moments, and these need the old moments. So the results of a layer are written one after the other:
the moments first, and the parameter from the moments that are read back. Lion's parameter needs the
old moment, so it is written before the moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from xform._jax import Var
from xform.fused.layers import LayerTarget, LeafUpdate, Sliced


@dataclasses.dataclass(frozen=True, eq=False)
class Write:
    """Targets, and the equations that compute them from old layers and earlier targets."""

    targets: tuple[LayerTarget, ...]
    equations: tuple[Sliced, ...]


def writes_of(update: LeafUpdate) -> list[Write]:
    """Return the writes of a leaf, ordered so that nothing reads a layer after it is overwritten.

    If there is no such order, the remaining targets are computed together before one is written.
    XLA then copies stacks.
    """
    remaining, written = list(update.targets), set[Var]()
    writes: list[Write] = []
    while remaining:
        free = next((t for t in remaining if _is_free(update, t, remaining, written)), None)
        targets = tuple(remaining) if free is None else (free,)
        remaining = [t for t in remaining if t not in targets]
        writes.append(Write(targets, _needed(update, [t.new for t in targets], written)))
        written.update(t.new for t in targets)
    return writes


def sums_of(update: LeafUpdate) -> tuple[Sliced, ...]:
    """Return the equations that compute what a layer contributes to sums over all layers."""
    return _needed(update, [v for e in update.sums for v in e.outvars], set())


def _is_free(
    update: LeafUpdate, target: LayerTarget, remaining: Sequence[LayerTarget], written: set[Var]
) -> bool:
    """Whether no other remaining target reads the old layer of this one after it is written."""
    others = [t.new for t in remaining if t is not target]
    equations = _needed(update, others, written | {target.new})
    return all(target.old not in eqn.invars for eqn, _ in equations)


def _needed(update: LeafUpdate, wanted: Sequence[Var], known: set[Var]) -> tuple[Sliced, ...]:
    """Return the equations of a layer that compute `wanted` values from `known` ones, in order."""
    needed = {*wanted}
    found: list[Sliced] = []
    for eqn, axis in reversed(update.equations):
        if any(v in needed and v not in known for v in eqn.outvars):
            found.append((eqn, axis))
            needed.update(v for v in eqn.invars if isinstance(v, Var) and v not in known)
    return tuple(reversed(found))
