"""Find values to write to memory, so that the compiler does not keep larger values instead.

There are two kinds, both among the values of a forward pass:

- Saved values. A compiler may fuse the operations that compute a saved value into its readers. It
  then keeps the inputs of these operations instead, which may be larger: for a dropout mask, the
  random bits.
- On CPU, operands of pooling. XLA:CPU runs pooling in a library, together with the operations that
  compute the operand, unless another operation reads the operand too. The library gets each
  constant of these operations as an array as large as the operand. The backward part reads the same
  arrays, so they stay in memory. Writing the operand to memory first avoids these arrays.

Compilers for CPUs and GPUs need the first, XLA:CPU the second, with JAX 0.10.2 to 0.12.0.1. The
cost is to write and read the value. The switches are `saved_values_written` and
`pooling_operands_written`: without them, layers with dropout took 1.7 times the temporary bytes on
a CPU, and convolutions with pooling 2.1 times (`experiments/steering`).

`materialize.py` has the operation that writes a value to memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from xform._jax import JaxprEqn, Literal, Var
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Schedule
from xform.program.dimensions import has_elements
from xform.registry.table import traits
from xform.steering.barrier import Where
from xform.steering.settings import steering
from xform.steering.wait import is_work

# Write a value if the values that a compiler would keep instead take this many times its bytes.
_LARGER = 3
# No more operations than this are followed from a value to the values that it is recomputed from.
_MAX_REPEATED = 256
# Kinds of operations that XLA may repeat for each reader instead of keeping the result.
_REPEATED = ("elementwise", "movement")


def must_materialize(schedule: Schedule) -> dict[Var, Where]:
    """Return the values of a forward part to write to memory, with the backends on which.

    A Schedule says which values of the forward part are saved. The result has saved values that are
    much smaller than the values a compiler would keep to recompute them, and pooling operands that
    are not saved. Values that are in memory anyway do not count as kept: inputs, constants and
    other saved values.

    The result is meant for a forward part that is compiled with its backward part, outside loops. A
    loop writes its saved values anyway, because it stacks them.
    """
    if "must_materialize" not in schedule.cache:
        available = {schedule.joint.named_copy.get(v, v) for v in schedule.saved}
        available |= {*schedule.joint.inputs, *(v for v, _ in schedule.joint.program.consts)}
        on, where = steering(), dict[Var, Where]()
        for v in _pooling_operands(schedule) if on.pooling_operands_written else ():
            if v not in available and _fused_with_constants(schedule, v, available):
                where[v] = "cpu"
        for v in schedule.saved if on.saved_values_written else ():
            if v not in schedule.offloaded and _from_larger(schedule, v, available):
                where[v] = "everywhere"
        schedule.cache["must_materialize"] = where
    return schedule.cache["must_materialize"]


def _pooling_operands(schedule: Schedule) -> Iterator[Var]:
    """Yield the operands of pooling in the forward part."""
    for eqn in schedule.joint.forward:
        if traits(eqn.primitive).pools and isinstance(v := eqn.invars[0], Var) and plain(v):
            yield v


def _fused_with_constants(schedule: Schedule, v: Var, available: set[Var]) -> bool:
    """Return whether the fusion that computes a value from values in memory has constants.

    If the computation contains a call, the answer is yes.
    """
    todo, seen = [v], {v}
    for x in todo:
        producer = schedule.joint.producer.get(x)
        if producer is None or is_work(producer):
            continue
        if traits(producer.primitive).call or any(isinstance(y, Literal) for y in producer.invars):
            return True
        operands = (y for y in producer.invars if isinstance(y, Var))
        new = [y for y in operands if y not in available and y not in seen]
        seen.update(new)
        todo += new
    return False


def _from_larger(schedule: Schedule, v: Var, available: set[Var]) -> bool:
    """Return whether a compiler would keep much larger values to recompute `v` from them.

    `available` are values that are in memory anyway.
    """
    eqn = schedule.joint.producer.get(v)
    if eqn is None or not _repeated(eqn) or not plain(v):
        return False
    bytes_left, todo, seen = _LARGER * aval_bytes(v.aval), [eqn], set[Var]()
    for equation in todo:
        for x in equation.invars:
            if isinstance(x, Literal) or x in available or x in seen:
                continue
            seen.add(x)
            producer = schedule.joint.producer.get(x)
            if producer is not None and _repeated(producer):
                todo.append(producer)
            else:
                bytes_left -= aval_bytes(x.aval)
        if bytes_left <= 0 or len(todo) > _MAX_REPEATED:
            return bytes_left <= 0
    return False


def _repeated(eqn: JaxprEqn) -> bool:
    """Return whether XLA may repeat an operation for each reader instead of keeping its result."""
    facts = traits(eqn.primitive)
    cheap = facts.fusion in _REPEATED and not facts.expensive
    return cheap and facts.pure and len(eqn.outvars) == 1


def plain(v: Any) -> bool:
    """Return whether a value is a non-empty array of bools, or of real numbers of whole bytes."""
    dtype = v.aval.dtype
    real = jnp.issubdtype(dtype, np.floating)
    if real or jnp.issubdtype(dtype, np.integer):
        whole_bytes = (jnp.finfo if real else jnp.iinfo)(dtype).bits >= 8
        return whole_bytes and has_elements(v.aval.shape)
    return dtype == np.bool_ and has_elements(v.aval.shape)
