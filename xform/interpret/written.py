"""Which saved values have to be written, lest a compiler keep what they are made from."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn, Literal, Var
from xform.cost import aval_bytes
from xform.interpret.joint import Plan
from xform.table import traits

# A value is written if what a compiler would keep in its place takes so many times its bytes.
_LARGER = 3
# What XLA computes again rather than keep its result.
_REPEATED = ("elementwise", "movement")


def written(plan: Plan) -> frozenset[Var]:
    """The saved values that are much smaller than what a compiler would make them from again.

    Of a forward part that is compiled with its backward part, outside loops: what a loop stacks is
    written anyway. Inputs, and what else is saved, are there in any case, and cost nothing.
    """
    if "written" not in plan.cache:
        there = {plan.joint.named.get(v, v) for v in plan.kept}
        there |= {*plan.joint.inputs, *(v for v, _ in plan.joint.program.consts)}
        plan.cache["written"] = frozenset(
            v for v in plan.kept if v not in plan.offloaded and _from_larger(plan, v, there)
        )
    return plan.cache["written"]


def _from_larger(plan: Plan, v: Var, there: set[Var]) -> bool:
    eqn = plan.joint.producer.get(v)
    if eqn is None or not _repeated(eqn) or not _plain(v):
        return False
    room, todo, seen = _LARGER * aval_bytes(v.aval), [eqn], set[Var]()
    for equation in todo:
        for x in equation.invars:
            if isinstance(x, Literal) or x in there or x in seen:
                continue
            seen.add(x)
            maker = plan.joint.producer.get(x)
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


def _plain(v: Any) -> bool:
    """Whether it has elements, of a type of whole bytes."""
    dtype = v.aval.dtype
    real = jnp.issubdtype(dtype, np.floating)
    if real or jnp.issubdtype(dtype, np.integer):
        return v.aval.size > 0 and (jnp.finfo if real else jnp.iinfo)(dtype).bits >= 8
    return dtype == np.bool_ and v.aval.size > 0
