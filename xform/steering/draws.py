"""Let random draws of a forward part wait for the layer that reads them.

Random bits depend on nothing but a key. XLA:CPU orders operations by their operands alone, so it
draws the bits of all layers first, and keeps them until their layers run. For each dropout mask
these are two arrays of 32-bit numbers, each four times as large as the mask. So on CPU the key of a
large draw waits at a barrier for the last work before it. Work means an operation that XLA does not
fuse, such as a matrix product.

Only XLA:CPU needs this, with JAX 0.10.2 to 0.12.0.1: other compilers order operations by memory.
The cost is a select on a key. The switch is `draws_wait` (`experiments/steering`).
"""

from __future__ import annotations

from collections.abc import Sequence

from xform._jax import JaxprEqn, Var
from xform.interpret.cost import aval_bytes
from xform.registry.table import traits
from xform.steering.barrier import can_wait
from xform.steering.settings import steering
from xform.steering.wait import Wait, Waits, is_work

# A smaller draw, in bytes, does not wait.
_SMALLEST = 2**18


def find_draw_waits(equations: Sequence[JaxprEqn]) -> Waits:
    """Return the waits of the large draws among `equations`, by the index of the equation.

    A draw waits for a value that another equation reads, since others may never be computed.
    """
    if not steering().draws_wait:
        return {}
    read = {v for eqn in equations for v in eqn.invars if isinstance(v, Var)}
    waits: dict[int, list[Wait]] = {}
    last: Var | None = None
    for i, eqn in enumerate(equations):
        if last is not None and _is_large_draw(eqn):
            keys = tuple(v for v in eqn.invars if isinstance(v, Var) and can_wait(v.aval))
            if keys:
                waits[i] = [Wait(keys, (last,), "cpu")]
        elif is_work(eqn) and not traits(eqn.primitive).random:
            last = next((v for v in eqn.outvars if v in read and can_wait(v.aval)), last)
    return waits


def _is_large_draw(eqn: JaxprEqn) -> bool:
    """Return whether an equation draws many random numbers."""
    size = sum(aval_bytes(v.aval) for v in eqn.outvars)
    return traits(eqn.primitive).random and size >= _SMALLEST
