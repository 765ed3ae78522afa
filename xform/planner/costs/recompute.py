"""The price of recomputing an equation, in bytes: nearly nothing, a price per FLOP, or infinite.

- XLA fuses elementwise operations, reductions and movements of data with their readers. To
  recompute them costs no more passes over memory than to save them.
- Products, convolutions, sorts, factorizations, loops and calls cost a price per FLOP.
- Random numbers, effects, collectives and foreign code are recomputed only if a policy asks for it
  by name. Here their price is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from xform._jax import JaxprEqn
from xform.interpret.cost import aval_bytes, equation_bytes, equation_flops
from xform.interpret.node import user_equation
from xform.passes.structured import called_body
from xform.registry.table import traits

# Price of each byte that a recomputed equation passes over, in bytes of saved values.
_FUSED, _REDUCED = 1 / 1024, 1 / 64


def fusible(eqn: JaxprEqn) -> bool:
    """Whether XLA fuses an equation with the readers of its result.

    A call fuses if all equations of its body do.
    """
    of = traits(eqn.primitive)
    if eqn.effects:
        return False
    if of.call and of.pure:
        return all(map(fusible, called_body(eqn).equations))
    return of.fusible


def price(eqn: JaxprEqn, flop: float = math.inf) -> float:
    """Return the price of recomputing an equation, in bytes of saved values.

    `flop` is the price of one FLOP of an equation that does not fuse. An equation that fuses has a
    small price, so saved bytes decide, and between plans of equal bytes the one with less work
    wins. The price of a reduction is higher, so a per-row statistic such as a mean is saved.
    """
    if fusible(eqn):
        return _fused_price(eqn)
    if flop == math.inf or not repeatable(eqn):
        return math.inf
    called = user_equation(eqn)
    return flop * equation_flops(called) + _FUSED * sum(aval_bytes(v.aval) for v in called.outvars)


class Prices:
    """The prices of some equations, as arrays, for any price of a FLOP or of a slow function."""

    def __init__(self, equations: Sequence[JaxprEqn]):
        self._fixed = np.asarray([price(eqn, 0.0) for eqn in equations], np.float64)
        has_work = [not fusible(eqn) and repeatable(eqn) for eqn in equations]
        pairs = zip(equations, has_work, strict=True)
        self._has_work = np.asarray(has_work, bool)
        self._flops = np.asarray([equation_flops(user_equation(e)) if on else 0 for e, on in pairs])
        self._slow_bytes = np.asarray([_slow_bytes(e) for e in equations], np.float64)

    def at(self, flop: np.ndarray, slow: float = 0.0) -> np.ndarray:
        """Return the price of each equation.

        `flop` holds one price of a FLOP for each equation. `slow` is the price of each byte that a
        slow elementwise function computes.
        """
        work = np.where(np.isinf(flop), math.inf, np.where(np.isinf(flop), 0, flop) * self._flops)
        fixed = self._fixed + slow * self._slow_bytes
        return np.where(self._has_work, work + fixed, fixed)


def repeatable(eqn: JaxprEqn) -> bool:
    """Whether an equation may be recomputed without a policy that asks for it by name."""
    called = user_equation(eqn)
    return not called.effects and traits(called.primitive).repeatable


def _fused_price(eqn: JaxprEqn) -> float:
    """The price of an equation that XLA fuses: a small factor times the bytes it passes over."""
    of = traits(eqn.primitive)
    if of.call:
        return sum(map(_fused_price, called_body(eqn).equations))
    return (_REDUCED if of.fusion == "reduction" else _FUSED) * equation_bytes(eqn)


def _slow_bytes(eqn: JaxprEqn) -> float:
    """The bytes that slow elementwise functions compute in an equation that XLA fuses."""
    of = traits(eqn.primitive)
    if not fusible(eqn):
        return 0
    if of.call:
        return sum(map(_slow_bytes, called_body(eqn).equations))
    return equation_bytes(eqn) if of.expensive else 0
