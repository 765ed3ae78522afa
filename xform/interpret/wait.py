"""Which saved values wait for which cotangents, so that a recompute is neither merged nor early."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn, Var, broadcast_in_dim_p, itemsize
from xform.interpret.joint import Plan, reads_of
from xform.interpret.node import fork_p

# The part of all that is made again, or kept, that the runs which are called light make together.
_LIGHT = 1 / 6


@dataclasses.dataclass(frozen=True)
class Wait:
    """Values that wait for cotangents; `light` if little is lost should they not wait."""

    saved: tuple[Var, ...]
    seconds: tuple[Var, ...]
    light: bool = False


Waits = dict[int, Wait]


def waits(plan: Plan, whole: bool) -> Waits:
    """What waits, by its place in `plan.order`.

    In a region there is one place, its start. In a `whole` function, or the body of a loop, each
    run of recomputed equations waits for the cotangents of the equation that it is run again for.
    """
    if ("waits", whole) not in plan.cache:
        plan.cache["waits", whole] = _each(plan) if whole else _once(plan)
    return plan.cache["waits", whole]


def _once(plan: Plan) -> Waits:
    first = {id(e) for e in plan.joint.first}
    saved = cover([e for e in plan.order if id(e) in first], plan)
    return {0: Wait(saved, plan.joint.second_inputs)} if saved else {}


def _each(plan: Plan) -> Waits:
    second = set(plan.joint.second_inputs)
    first = {id(e) for e in plan.joint.first}
    found: Waits = {}
    made: dict[int, float] = {}
    run: list[JaxprEqn] = []
    start = 0
    for i, eqn in enumerate(plan.order):
        if id(eqn) in first:
            start = start if run else i
            run.append(eqn)
            continue
        cts = tuple(v for v in reads_of(eqn, plan.inner) if v in second)
        saved = cover(run, plan) if cts else ()
        if saved:
            found[start], made[start] = Wait(saved, cts), sum(map(_bytes, run))
        second.update(eqn.outvars)
        run = []
    finite = [i for i in made if made[i] < math.inf]
    left = _LIGHT * sum((*(made[i] for i in finite), *(_size(v) for v in plan.kept)))
    light: set[int] = set()
    for i in sorted(finite, key=made.__getitem__):
        left -= made[i]
        if left < 0:
            break
        light.add(i)
    return {i: dataclasses.replace(w, light=i in light) for i, w in found.items()}


def _size(v: Var) -> int:
    return _aval(v).size * itemsize(_aval(v).dtype)


def _bytes(eqn: JaxprEqn) -> float:
    """Bytes of what an equation makes; a loop that is run again is never little."""
    if eqn.primitive is fork_p:
        return math.inf
    return sum(map(_size, eqn.outvars))


def cover(run: Sequence[JaxprEqn], plan: Plan) -> tuple[Var, ...]:
    """The fewest values, greedily, such that each recomputed equation depends on one of them.

    Equations that cost nothing may stay merged. What is repeated may not, be it a row's statistic:
    some fusions of XLA:CPU write the broadcast out. The values are among what the equations read
    and do not make themselves; the smallest is taken where it makes no difference, since what is
    tied may be copied.
    """
    depends: dict[Var, int] = {}
    leaves: dict[Var, int] = {}
    reached: list[int] = []
    for eqn in run:
        over = 0
        for v in reads_of(eqn, plan.inner):
            if v not in depends:
                depends[v] = leaves[v] = 1 << len(leaves)
            over |= depends[v]
        if id(eqn) in plan.again:
            reached.append(over)
        reached += [
            depends[v] for v in reads_of(eqn, plan.inner) if _repeated(v, eqn) and depends[v]
        ]
        depends.update((v, over) for v in eqn.outvars)
    gain = {v: 0 for v in leaves if jnp.issubdtype(_aval(v).dtype, np.number)}
    for i, over in enumerate(reached):
        for v in gain:
            if over & leaves[v]:
                gain[v] |= 1 << i
    left = (1 << len(reached)) - 1
    chosen: list[Var] = []
    while gain:
        best = max(gain, key=lambda v: ((gain[v] & left).bit_count(), -_aval(v).size))
        if not gain[best] & left:
            break
        chosen.append(best)
        left &= ~gain[best]
    return tuple(chosen)


def _repeated(v: Var, eqn: JaxprEqn) -> bool:
    """Whether an elementwise equation, or a broadcast, repeats the elements of an input."""
    x, y = _aval(v), _aval(eqn.outvars[0])
    if eqn.primitive is broadcast_in_dim_p:
        return x.size < y.size
    pairs = zip(x.shape, y.shape, strict=False)
    return x.ndim == y.ndim and x.size < y.size and all(a in (1, b) for a, b in pairs)


def _aval(v: Any) -> Any:
    return v.aval
