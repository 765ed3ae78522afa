"""Loops and branches: the sets of what they carry.

A loop of a known number of steps is followed step by step if that is not too long, with the values
that are known at each; a scan that carries no set is one program for all steps at once. Otherwise
the carried sets grow until they are the same after a step as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import JaxprEqn, cond_p, scan_counts, scan_p, while_p
from xform.cost import shape
from xform.ir import Program, evaluate, program, trace
from xform.sparse import sets as S
from xform.sparse.known import Facts
from xform.sparse.sets import Sets
from xform.sparse.steps import Some
from xform.sparse.walk import Walk, flat

# Equations that are followed one by one, of all steps of a loop together.
_STEPS = 20_000
# Steps after which carried sets that still grow are united.
_GROWTH = 32


def _cond(walk: Walk, eqn: JaxprEqn, sets: Some, facts: Facts) -> list[Sets | None]:
    """Of the branch that is taken, if that is known; or of any."""
    branches = list(map(program, eqn.params["branches"]))
    which, *values = facts.values
    if which is not None:
        branches = [branches[min(max(int(which), 0), len(branches) - 1)]]
    found = [walk.follow(b, sets[1:], values) for b in branches]
    return [_either(ways) for ways in zip(*found, strict=True)]


def _either(ways: Sequence[Sets | None]) -> Sets | None:
    some = [x for x in ways if x is not None]
    return S.either(some) if some else None


def _scan(walk: Walk, eqn: JaxprEqn, sets: Some, facts: Facts) -> list[Sets | None]:
    body, length = program(eqn.params["jaxpr"]), eqn.params["length"]
    a, n = scan_counts(eqn.params)
    b = a + n
    if not length:
        return [*sets[a:b], *[None] * (len(eqn.outvars) - n)]
    if not _carries(walk, body, sets, a, b):
        return _mapped(walk, eqn, body, sets, facts, a, b)
    if length * len(flat(body).equations) > _STEPS:
        return _grown(walk, eqn, body, sets, facts, a, b)
    carry, known = list(sets[a:b]), list(facts.values[a:b])
    steps = range(length)[:: -1 if eqn.params["reverse"] else 1]
    stacked: list[Some] = [()] * length
    for t in steps:
        seq = [None if x is None else x.at(x.ids[t]) for x in sets[b:]]
        values = [*facts.values[:a], *known, *(None if v is None else v[t]
                                               for v in facts.values[b:])]  # fmt: skip
        outs, found = walk.run(body, [*sets[:a], *carry, *seq], values)
        carry, known, stacked[t] = outs[:n], found[:n], outs[n:]
    return [*carry, *(_stack(column) for column in zip(*stacked, strict=True))]


def _stack(column: Some) -> Sets | None:
    some = [x for x in column if x is not None]
    if not some:
        return None
    ids, table = S.together(some)
    rows = iter(ids)
    none = np.zeros_like(ids[0])
    return Sets(np.stack([none if x is None else next(rows) for x in column]), table)


def _carries(walk: Walk, body: Program, sets: Some, a: int, b: int) -> bool:
    """Whether anything that is carried depends on an input, after some step."""
    if any(x is not None for x in sets[a:b]):
        return True
    seq = [None if x is None else S.over(x, (0,)) for x in sets[b:]]
    outs = walk.follow(body, [*sets[:b], *seq], [None] * len(sets))
    return any(x is not None for x in outs[: b - a])


def _mapped(walk: Walk, eqn: JaxprEqn, body: Program, sets: Some, facts: Facts, a: int, b: int
            ) -> list[Sets | None]:  # fmt: skip
    """All steps at once, each with a carry that is not known."""
    length = eqn.params["length"]
    axes = [None] * a + [0] * (len(sets) - a)
    steps = jax.vmap(lambda *xs: evaluate(body, xs), axes, axis_size=length)
    avals: list[Any] = [v.aval for v in eqn.invars]
    many = [aval.update(shape=(length, *aval.shape)) for aval in avals[a:b]]
    prog = trace(steps, *avals[:a], *many, *avals[b:])
    values = [*facts.values[:a], *[None] * (b - a), *facts.values[b:]]
    ys = walk.follow(prog, sets, values)[b - a :]
    return [*[None] * (b - a), *ys]


def _grown(walk: Walk, eqn: JaxprEqn, body: Program, sets: Some, facts: Facts, a: int, b: int
           ) -> list[Sets | None]:  # fmt: skip
    """As if each step could see the scanned inputs of all."""
    seq = [None if x is None else S.over(x, (0,)) for x in sets[b:]]
    values = [*facts.values[:a], *[None] * (len(sets) - a)]

    def step(carry: Some) -> list[Sets | None]:
        return walk.follow(body, [*sets[:a], *carry, *seq], values)

    carry = _fixed(lambda carry: step(carry)[: b - a], list(sets[a:b]))
    outs = step(carry)[b - a :]
    shapes = map(shape, eqn.outvars[b - a :])
    wide = [None if y is None else y.at(np.broadcast_to(y.ids, s))
            for y, s in zip(outs, shapes, strict=True)]  # fmt: skip
    return [*carry, *wide]


def _fixed(step: Any, carry: list[Sets | None]) -> list[Sets | None]:
    """The least sets that hold those of the start, and those of a step from themselves."""
    for i in range(2 * _GROWTH):
        new = [_either(pair) for pair in zip(carry, step(carry), strict=True)]
        if all(map(_same, carry, new)):
            return carry
        carry = new if i < _GROWTH else list(map(_blurred, new))
    return list(map(_all, carry))


def _same(old: Sets | None, new: Sets | None) -> bool:
    """Of sets that can only have grown."""
    if old is None or new is None:
        return new is None
    return np.array_equal(old.sizes[old.ids], new.sizes[new.ids])


def _blurred(x: Sets | None) -> Sets | None:
    """The union of all elements' sets, for each."""
    if x is None:
        return None
    one = S.over(x, range(x.ids.ndim))
    return one.at(np.broadcast_to(one.ids, x.ids.shape))


def _all(x: Sets | None) -> Sets | None:
    return None if x is None else x.at(np.full_like(x.ids, S.ALL))


def _while(walk: Walk, eqn: JaxprEqn, sets: Some, facts: Facts) -> list[Sets | None]:
    """Step by step while it is known whether there is another one."""
    until, body = program(eqn.params["cond_jaxpr"]), program(eqn.params["body_jaxpr"])
    a = eqn.params["cond_nconsts"]
    b = a + eqn.params["body_nconsts"]
    consts, carry, known = sets[a:b], list(sets[b:]), list(facts.values[b:])
    held = facts.values[a:b]
    for _ in range(_STEPS // max(len(flat(body).equations), 1)):
        none = [None] * len(until.inputs)
        ((more,),) = [walk.run(until, none, [*facts.values[:a], *known])[1]]
        if more is None:
            break
        if not more:
            return carry
        carry, known = walk.run(body, [*consts, *carry], [*held, *known])
    unknown = [None] * len(known)
    return _fixed(lambda now: walk.follow(body, [*consts, *now], [*held, *unknown]), carry)


def walk() -> Walk:
    """A way through programs with loops and branches."""
    return Walk({cond_p: _cond, scan_p: _scan, while_p: _while})
