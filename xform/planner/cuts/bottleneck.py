"""Find the narrow places of a forward pass: where values of few bytes cross, as between two layers.

A value crosses a place if an equation before the place computes it and one after it reads it. If
the values that cross a narrow place are saved, the backward pass recomputes each part between two
such places on its own, when the cotangents of that part are available. Otherwise a chain of cheap
recomputed equations may reach back over many layers. All its values are then live at once, until
the backward pass of each layer has used them.
"""

from __future__ import annotations

import math

from xform._jax import Var
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Joint
from xform.passes.dce import live
from xform.planner.costs.recompute import fusible
from xform.registry.table import traits


def bottlenecks(joint: Joint) -> tuple[frozenset[Var], ...]:
    """Return the values that cross each narrow place, in program order.

    `joint` holds the forward and the backward pass as one program; places are in the forward pass.
    Between two consecutive equations that XLA does not fuse, such as products, the place where the
    fewest bytes cross is a candidate. It is narrow if neither the candidate before it nor the one
    after it is crossed by fewer bytes.

    Cost: linear in the number of equations.
    """
    cache = joint.program.cache
    if "bottlenecks" not in cache:
        cache["bottlenecks"] = _bottlenecks(joint)
    return cache["bottlenecks"]


def _bottlenecks(joint: Joint) -> tuple[frozenset[Var], ...]:
    """Return the same as `bottlenecks`, without the cache."""
    forward = live(joint.forward, joint.outputs, effects=False)
    roots = roots_of(joint)
    last_read = {
        roots[v]: i
        for i, eqn in enumerate(forward)
        for v in eqn.invars
        if isinstance(v, Var) and v in roots
    }
    last_reads_at: dict[int, list[Var]] = {}
    for v, i in last_read.items():
        last_reads_at.setdefault(i, []).append(v)
    crossing: dict[Var, int] = {}
    total = 0
    # The narrowest place after each equation that XLA does not fuse: its bytes and its values.
    candidates: list[tuple[float, frozenset[Var]]] = []
    for i, eqn in enumerate(forward):
        if not fusible(eqn):
            candidates.append((math.inf, frozenset()))
        for v in eqn.outvars:
            if last_read.get(v, i) > i:
                crossing[v] = aval_bytes(v.aval)
                total += crossing[v]
        for v in last_reads_at.get(i, ()):
            total -= crossing.pop(v, 0)
        if candidates and 0 < total <= candidates[-1][0]:
            candidates[-1] = total, frozenset(crossing)
    sizes = [math.inf, *(size for size, _ in candidates), math.inf]
    neighbours = zip(sizes, sizes[2:], candidates, strict=False)
    return tuple(
        values
        for before, after, (size, values) in neighbours
        if values and size <= min(before, after)
    )


def roots_of(joint: Joint) -> dict[Var, Var]:
    """Map each forward value to its root: the value that it is a view of, or the value itself.

    A value and its views have one root, so their bytes count once. A value that `checkpoint_name`
    returns has the root of its operand. Values that are computed from inputs by equations that XLA
    fuses, such as a slice of a parameter, are not in the map.
    """
    roots: dict[Var, Var] = {}
    for eqn in joint.forward:
        reads = [v for v in eqn.invars if isinstance(v, Var) and v in roots]
        if not reads and fusible(eqn):
            continue
        for v in eqn.outvars:
            is_view = traits(eqn.primitive).label or v in joint.always_recomputed
            roots[v] = roots[reads[0]] if is_view and reads else v
    return roots
