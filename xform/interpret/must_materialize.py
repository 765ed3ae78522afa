"""Find values to write to memory, so that the compiler does not keep their larger inputs instead.

These are saved values, and on CPU the operands of pooling. XLA:CPU gives pooling to a library,
together with the operations that compute the operand, unless another operation reads the operand.
The library gets each constant in these operations as a whole array, and the backward part has the
same constants. Each such array would be as large as the operand itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn, Literal, Var
from xform.interpret.barrier import Where
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Schedule
from xform.interpret.wait import is_work
from xform.registry.table import traits

# Write a value if the values that a compiler would keep instead take this many times its bytes.
_LARGER = 3
# Operations that XLA recomputes rather than keep their result.
_REPEATED = ("elementwise", "movement")


def must_materialize(schedule: Schedule) -> dict[Var, Where]:
    """Return values to write to memory, with the backends on which to write them.

    These are saved values much smaller than the values from which a compiler would recompute them,
    and pooling operands that are not saved. The result is for a forward part that is compiled with
    its backward part, outside loops: a loop writes the values that it stacks in any case. Inputs
    and other saved values are in memory in any case, so they cost nothing.
    """
    if "must_materialize" not in schedule.cache:
        available = {schedule.joint.named_copy.get(v, v) for v in schedule.saved}
        available |= {*schedule.joint.inputs, *(v for v, _ in schedule.joint.program.consts)}
        smaller = [
            v
            for v in schedule.saved
            if v not in schedule.offloaded and _from_larger(schedule, v, available)
        ]
        pooled = [
            v
            for v in _pooled(schedule)
            if v not in available and _of_constants(schedule, v, available)
        ]
        where: dict[Var, Where] = {v: "cpu" for v in pooled}
        where.update((v, "everywhere") for v in smaller)
        schedule.cache["must_materialize"] = where
    return schedule.cache["must_materialize"]


def _pooled(schedule: Schedule) -> Iterator[Var]:
    """Yield the operands of pooling in the forward part."""
    for eqn in schedule.joint.forward:
        if traits(eqn.primitive).pools and isinstance(v := eqn.invars[0], Var) and plain(v):
            yield v


def _of_constants(schedule: Schedule, v: Var, available: set[Var]) -> bool:
    """Whether the operations that XLA fuses to compute a value have constants in them."""
    todo, seen = [v], {v}
    for x in todo:
        maker = schedule.joint.producer.get(x)
        if maker is None or is_work(maker):
            continue
        if traits(maker.primitive).call or any(isinstance(y, Literal) for y in maker.invars):
            return True
        read = (y for y in maker.invars if isinstance(y, Var))
        more = [y for y in read if y not in available and y not in seen]
        seen.update(more)
        todo += more
    return False


def _from_larger(schedule: Schedule, v: Var, available: set[Var]) -> bool:
    """Whether a compiler would keep much larger values to recompute `v` from them."""
    eqn = schedule.joint.producer.get(v)
    if eqn is None or not _repeated(eqn) or not plain(v):
        return False
    bytes_left, todo, seen = _LARGER * aval_bytes(v.aval), [eqn], set[Var]()
    for equation in todo:
        for x in equation.invars:
            if isinstance(x, Literal) or x in available or x in seen:
                continue
            seen.add(x)
            maker = schedule.joint.producer.get(x)
            if maker is not None and _repeated(maker):
                todo.append(maker)
            else:
                bytes_left -= aval_bytes(x.aval)
        if bytes_left <= 0:
            return True
    return False


def _repeated(eqn: JaxprEqn) -> bool:
    """Whether XLA recomputes an operation rather than keep its result."""
    of = traits(eqn.primitive)
    return of.fusion in _REPEATED and of.pure and not of.expensive and len(eqn.outvars) == 1


def plain(v: Any) -> bool:
    """Whether a value has elements, of a type of whole bytes."""
    dtype = v.aval.dtype
    real = jnp.issubdtype(dtype, np.floating)
    if real or jnp.issubdtype(dtype, np.integer):
        return v.aval.size > 0 and (jnp.finfo if real else jnp.iinfo)(dtype).bits >= 8
    return dtype == np.bool_ and v.aval.size > 0
