"""The narrow places of a forward pass: where few bytes cross, as between two layers.

If the values that cross a narrow place are saved, the backward pass recomputes each part between
two such places on its own, when the cotangents of that part are available. Otherwise a chain of
cheap recomputes may reach back over many layers. All its values are then live at once, until the
backward pass of each layer has used them.
"""

from __future__ import annotations

import math

from xform._jax import Var, name_p
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Joint
from xform.passes.dce import live
from xform.planner.costs.recompute import fusible


def bottlenecks(joint: Joint) -> tuple[frozenset[Var], ...]:
    """Return the values that cross each narrow place of the forward part, in program order.

    Between two expensive equations, such as products, the place where the fewest bytes cross is a
    candidate. It is narrow if neither of its neighbours is crossed by fewer bytes. Linear in
    equations.
    """
    cache = joint.program.cache
    if "bottlenecks" not in cache:
        cache["bottlenecks"] = _bottlenecks(joint)
    return cache["bottlenecks"]


def _bottlenecks(joint: Joint) -> tuple[frozenset[Var], ...]:
    forward = live(joint.forward, joint.outputs, effects=False)
    roots = roots_of(joint)
    last = {
        roots[v]: i
        for i, eqn in enumerate(forward)
        for v in eqn.invars
        if isinstance(v, Var) and v in roots
    }
    ended: dict[int, list[Var]] = {}
    for v, i in last.items():
        ended.setdefault(i, []).append(v)
    crossing: dict[Var, int] = {}
    total = 0
    places: list[tuple[float, frozenset[Var]]] = []
    for i, eqn in enumerate(forward):
        if not fusible(eqn):
            places.append((math.inf, frozenset()))
        for v in eqn.outvars:
            if last.get(v, i) > i:
                crossing[v] = aval_bytes(v.aval)
                total += crossing[v]
        for v in ended.get(i, ()):
            total -= crossing.pop(v, 0)
        if places and 0 < total <= places[-1][0]:
            places[-1] = total, frozenset(crossing)
    sizes = [math.inf, *(size for size, _ in places), math.inf]
    around = zip(sizes, sizes[2:], places, strict=False)
    return tuple(values for a, b, (size, values) in around if values and size <= min(a, b))


def roots_of(joint: Joint) -> dict[Var, Var]:
    """Map each forward value to the value that it is a view or another name of, or to itself.

    Values that are computed from inputs by cheap equations alone, such as a slice of a parameter,
    are not in the map.
    """
    roots: dict[Var, Var] = {}
    for eqn in joint.forward:
        reads = [v for v in eqn.invars if isinstance(v, Var) and v in roots]
        if not reads and fusible(eqn):
            continue
        for v in eqn.outvars:
            view = eqn.primitive is name_p or v in joint.free
            roots[v] = roots[reads[0]] if view and reads else v
    return roots
