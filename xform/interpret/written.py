"""Which values have to be written: saved ones, lest a compiler keep what they are made from.

And what is pooled, on a CPU. Its compiler gives pooling to a library, with what makes its operand,
unless somebody else reads that; the library is given the constants in it as whole arrays, where the
backward part has the same constants. Each would be as large as the one value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn, Literal, Var
from xform.cost import aval_bytes
from xform.interpret.barrier import Where
from xform.interpret.joint import Schedule
from xform.interpret.wait import is_work
from xform.table import traits

# A value is written if what a compiler would keep in its place takes so many times its bytes.
_LARGER = 3
# What XLA computes again rather than keep its result.
_REPEATED = ("elementwise", "movement")


def written(schedule: Schedule) -> dict[Var, Where]:
    """The saved values that are much smaller than what a compiler would make them from again.

    With what is pooled and not saved; and on which backends. Of a forward part that is compiled
    with its backward part, outside loops: what a loop stacks is written anyway. Inputs, and what
    else is saved, are there in any case, and cost nothing.
    """
    if "written" not in schedule.cache:
        there = {schedule.joint.named.get(v, v) for v in schedule.kept}
        there |= {*schedule.joint.inputs, *(v for v, _ in schedule.joint.program.consts)}
        smaller = [
            v
            for v in schedule.kept
            if v not in schedule.offloaded and _from_larger(schedule, v, there)
        ]
        pooled = [
            v for v in _pooled(schedule) if v not in there and _of_constants(schedule, v, there)
        ]
        where: dict[Var, Where] = {v: "cpu" for v in pooled}
        where.update((v, "everywhere") for v in smaller)
        schedule.cache["written"] = where
    return schedule.cache["written"]


def _pooled(schedule: Schedule) -> Iterator[Var]:
    """What is pooled."""
    for eqn in schedule.joint.forward:
        if traits(eqn.primitive).pools and isinstance(v := eqn.invars[0], Var) and plain(v):
            yield v


def _of_constants(schedule: Schedule, v: Var, there: set[Var]) -> bool:
    """Whether what XLA fuses to make a value has constants in it."""
    todo, seen = [v], {v}
    for x in todo:
        maker = schedule.joint.producer.get(x)
        if maker is None or is_work(maker):
            continue
        if traits(maker.primitive).call or any(isinstance(y, Literal) for y in maker.invars):
            return True
        read = (y for y in maker.invars if isinstance(y, Var))
        more = [y for y in read if y not in there and y not in seen]
        seen.update(more)
        todo += more
    return False


def _from_larger(schedule: Schedule, v: Var, there: set[Var]) -> bool:
    eqn = schedule.joint.producer.get(v)
    if eqn is None or not _repeated(eqn) or not plain(v):
        return False
    room, todo, seen = _LARGER * aval_bytes(v.aval), [eqn], set[Var]()
    for equation in todo:
        for x in equation.invars:
            if isinstance(x, Literal) or x in there or x in seen:
                continue
            seen.add(x)
            maker = schedule.joint.producer.get(x)
            if maker is not None and _repeated(maker):
                todo.append(maker)
            else:
                room -= aval_bytes(x.aval)
        if room <= 0:
            return True
    return False


def _repeated(eqn: JaxprEqn) -> bool:
    of = traits(eqn.primitive)
    return of.fusion in _REPEATED and of.pure and not of.dear and len(eqn.outvars) == 1


def plain(v: Any) -> bool:
    """Whether it has elements, of a type of whole bytes."""
    dtype = v.aval.dtype
    real = jnp.issubdtype(dtype, np.floating)
    if real or jnp.issubdtype(dtype, np.integer):
        return v.aval.size > 0 and (jnp.finfo if real else jnp.iinfo)(dtype).bits >= 8
    return dtype == np.bool_ and v.aval.size > 0
