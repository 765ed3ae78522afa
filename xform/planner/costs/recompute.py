"""What running an equation again costs: nothing but reading and writing, real work, or too much.

Elementwise operations, reductions and moves of data are fused by XLA with what reads them: run
again they cost no more passes over memory than saving them. Products, convolutions, sorts,
factorizations, loops and calls are work. Random numbers, effects, collectives and calls of foreign
code are not run again unless a policy says so by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

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


class Prices:
    """The prices of some equations, for any price of a FLOP."""

    def __init__(self, equations: Sequence[JaxprEqn]):
        self._fixed = np.asarray([price(eqn, 0.0) for eqn in equations], np.float64)
        real = [not fusible(eqn) and repeatable(eqn) for eqn in equations]
        pairs = zip(equations, real, strict=True)
        self._real = np.asarray(real, bool)
        self._flops = np.asarray([equation_flops(bound(e)) if on else 0 for e, on in pairs])

    def at(self, flop: np.ndarray) -> np.ndarray:
        """The price of each, where that of a FLOP is `flop`, for each of them."""
        work = np.where(np.isinf(flop), math.inf, np.where(np.isinf(flop), 0, flop) * self._flops)
        return np.where(self._real, work + self._fixed, self._fixed)


def repeatable(eqn: JaxprEqn) -> bool:
    """Whether an equation may be run again at all."""
    called = bound(eqn)
    return not called.effects and traits(called.primitive).repeatable


def _passed_over(eqn: JaxprEqn) -> float:
    of = traits(eqn.primitive)
    if of.call:
        return sum(map(_passed_over, body(eqn).equations))
    return (_REDUCED if of.fusion == "reduction" else _FUSED) * equation_bytes(eqn)
