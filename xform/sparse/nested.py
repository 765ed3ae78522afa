"""Propagate sets of input elements through loops and branches.

A loop with a known trip count is followed iteration by iteration, with the values that are known in
each, unless that takes too long. A scan whose carry depends on no input element is handled as one
program for all iterations at once. For all other loops, the sets of the carry are iterated to a
fixed point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import JaxprEqn, cond_p, scan_counts, scan_p, while_p
from xform.interpret.cost import shape
from xform.program.ir import Program, evaluate, program, trace
from xform.sparse import sets as S
from xform.sparse.known import Facts
from xform.sparse.sets import Sets
from xform.sparse.steps import MaybeSets
from xform.sparse.walk import SetPropagator, flat

# Maximum number of equations, over all iterations, for following a loop iteration by iteration.
_STEPS = 20_000
# Iterations of the fixed point after which all elements of a carried value share one set.
_GROWTH = 32


def _cond(
    propagator: SetPropagator, eqn: JaxprEqn, sets: MaybeSets, facts: Facts
) -> list[Sets | None]:
    """A cond: the sets of the branch that is taken, if known; else the union over all branches."""
    branches = list(map(program, eqn.params["branches"]))
    which, *values = facts.values
    if which is not None:
        branches = [branches[min(max(int(which), 0), len(branches) - 1)]]
    results = [propagator.follow(b, sets[1:], values) for b in branches]
    return [_either(alternatives) for alternatives in zip(*results, strict=True)]


def _either(alternatives: Sequence[Sets | None]) -> Sets | None:
    some = [x for x in alternatives if x is not None]
    return S.either(some) if some else None


def _scan(
    propagator: SetPropagator, eqn: JaxprEqn, sets: MaybeSets, facts: Facts
) -> list[Sets | None]:
    """A scan: in one of three ways, see the docstring of the module."""
    body, length = program(eqn.params["jaxpr"]), eqn.params["length"]
    a, n = scan_counts(eqn.params)
    b = a + n
    if not length:
        return [*sets[a:b], *[None] * (len(eqn.outvars) - n)]
    if not _carries(propagator, body, sets, a, b):
        return _as_vmap(propagator, eqn, body, sets, facts, a, b)
    if length * len(flat(body).equations) > _STEPS:
        return _by_fixed_point(propagator, eqn, body, sets, facts, a, b)
    carry, known = list(sets[a:b]), list(facts.values[a:b])
    steps = range(length)[:: -1 if eqn.params["reverse"] else 1]
    stacked: list[MaybeSets] = [()] * length
    for t in steps:
        seq = [None if x is None else x.at(x.ids[t]) for x in sets[b:]]
        values = [*facts.values[:a], *known, *(None if v is None else v[t]
                                               for v in facts.values[b:])]  # fmt: skip
        outs, found = propagator.run(body, [*sets[:a], *carry, *seq], values)
        carry, known, stacked[t] = outs[:n], found[:n], outs[n:]
    return [*carry, *(_stack(column) for column in zip(*stacked, strict=True))]


def _stack(column: MaybeSets) -> Sets | None:
    some = [x for x in column if x is not None]
    if not some:
        return None
    ids, table = S.together(some)
    rows = iter(ids)
    none = np.zeros_like(ids[0])
    return Sets(np.stack([none if x is None else next(rows) for x in column]), table)


def _carries(propagator: SetPropagator, body: Program, sets: MaybeSets, a: int, b: int) -> bool:
    """Whether the carry of a scan depends on an input element, at the start or later."""
    if any(x is not None for x in sets[a:b]):
        return True
    seq = [None if x is None else S.over(x, (0,)) for x in sets[b:]]
    outs = propagator.follow(body, [*sets[:b], *seq], [None] * len(sets))
    return any(x is not None for x in outs[: b - a])


def _as_vmap(propagator: SetPropagator, eqn: JaxprEqn, body: Program, sets: MaybeSets, facts: Facts,
             a: int, b: int) -> list[Sets | None]:  # fmt: skip
    """A scan whose carry depends on no input element: all iterations at once, as a vmap."""
    length = eqn.params["length"]
    axes = [None] * a + [0] * (len(sets) - a)
    steps = jax.vmap(lambda *xs: evaluate(body, xs), axes, axis_size=length)
    avals: list[Any] = [v.aval for v in eqn.invars]
    many = [aval.update(shape=(length, *aval.shape)) for aval in avals[a:b]]
    prog = trace(steps, *avals[:a], *many, *avals[b:])
    values = [*facts.values[:a], *[None] * (b - a), *facts.values[b:]]
    ys = propagator.follow(prog, sets, values)[b - a :]
    return [*[None] * (b - a), *ys]


def _by_fixed_point(propagator: SetPropagator, eqn: JaxprEqn, body: Program, sets: MaybeSets,
                    facts: Facts, a: int, b: int) -> list[Sets | None]:  # fmt: skip
    """A scan by a fixed point. Each iteration counts as reading the scanned inputs of all."""
    seq = [None if x is None else S.over(x, (0,)) for x in sets[b:]]
    values = [*facts.values[:a], *[None] * (len(sets) - a)]

    def step(carry: MaybeSets) -> list[Sets | None]:
        return propagator.follow(body, [*sets[:a], *carry, *seq], values)

    carry = _fixed_point(lambda carry: step(carry)[: b - a], list(sets[a:b]))
    outs = step(carry)[b - a :]
    shapes = map(shape, eqn.outvars[b - a :])
    wide = [None if y is None else y.at(np.broadcast_to(y.ids, s))
            for y, s in zip(outs, shapes, strict=True)]  # fmt: skip
    return [*carry, *wide]


def _fixed_point(step: Any, carry: list[Sets | None]) -> list[Sets | None]:
    """The fixed point of the carry's sets.

    These are the smallest sets that contain the initial ones and that an iteration of the loop does
    not enlarge. If it takes too long, larger sets are returned.
    """
    for i in range(2 * _GROWTH):
        new = [_either(pair) for pair in zip(carry, step(carry), strict=True)]
        if all(map(_same, carry, new)):
            return carry
        carry = new if i < _GROWTH else list(map(_all_shared, new))
    return list(map(_all, carry))


def _same(old: Sets | None, new: Sets | None) -> bool:
    """Whether the sets are equal. They can only have grown, so their sizes are compared."""
    if old is None or new is None:
        return new is None
    return np.array_equal(old.sizes[old.ids], new.sizes[new.ids])


def _all_shared(x: Sets | None) -> Sets | None:
    """Give each element the union of all elements' sets."""
    if x is None:
        return None
    union = S.over(x, range(x.ids.ndim))
    return union.at(np.broadcast_to(union.ids, x.ids.shape))


def _all(x: Sets | None) -> Sets | None:
    return None if x is None else x.at(np.full_like(x.ids, S.ALL))


def _while(
    propagator: SetPropagator, eqn: JaxprEqn, sets: MaybeSets, facts: Facts
) -> list[Sets | None]:
    """A while loop: iteration by iteration while the condition is known, then by a fixed point."""
    until, body = program(eqn.params["cond_jaxpr"]), program(eqn.params["body_jaxpr"])
    a = eqn.params["cond_nconsts"]
    b = a + eqn.params["body_nconsts"]
    consts, carry, known = sets[a:b], list(sets[b:]), list(facts.values[b:])
    constants = facts.values[a:b]
    for _ in range(_STEPS // max(len(flat(body).equations), 1)):
        none = [None] * len(until.inputs)
        ((more,),) = [propagator.run(until, none, [*facts.values[:a], *known])[1]]
        if more is None:
            break
        if not more:
            return carry
        carry, known = propagator.run(body, [*consts, *carry], [*constants, *known])
    unknown = [None] * len(known)
    return _fixed_point(
        lambda now: propagator.follow(body, [*consts, *now], [*constants, *unknown]), carry
    )


def set_propagator() -> SetPropagator:
    """A `SetPropagator` that handles loops and branches."""
    return SetPropagator({cond_p: _cond, scan_p: _scan, while_p: _while})
