"""What running an equation again costs: nothing but reading and writing, real work, or too much.

Elementwise operations, reductions and moves of data are fused by XLA with what reads them: run
again they cost no more passes over memory than saving them. Products, convolutions, sorts,
factorizations, loops and calls are work. Random numbers, effects, collectives and calls of foreign
code are not run again unless a policy says so by name.
"""

from __future__ import annotations

import math

from xform._jax import JaxprEqn
from xform.cost import aval_bytes, equation_bytes, equation_flops
from xform.interpret.node import bound
from xform.passes.structured import body
from xform.table import traits

# In bytes saved for each byte that is passed over again.
_FUSED, _REDUCED = 1 / 1024, 1 / 64


def fusible(eqn: JaxprEqn) -> bool:
    """Whether XLA fuses an equation with what reads its result; a call, if all that it calls."""
    of = traits(eqn.primitive)
    if eqn.effects:
        return False
    if of.call and of.pure:
        return all(map(fusible, body(eqn).equations))
    return of.fusible


def price(eqn: JaxprEqn, flop: float = math.inf) -> float:
    """The price of running an equation again, in bytes, if that of a FLOP of real work is `flop`.

    What fuses costs little, so that bytes decide; between equal bytes the less work wins, and a
    statistic of a row is worth saving.
    """
    if fusible(eqn):
        return _passed_over(eqn)
    if flop == math.inf or not repeatable(eqn):
        return math.inf
    called = bound(eqn)
    return flop * equation_flops(called) + _FUSED * sum(aval_bytes(v.aval) for v in called.outvars)


def repeatable(eqn: JaxprEqn) -> bool:
    """Whether an equation may be run again at all."""
    called = bound(eqn)
    return not called.effects and traits(called.primitive).repeatable


def _passed_over(eqn: JaxprEqn) -> float:
    of = traits(eqn.primitive)
    if of.call:
        return sum(map(_passed_over, body(eqn).equations))
    return (_REDUCED if of.fusion == "reduction" else _FUSED) * equation_bytes(eqn)
