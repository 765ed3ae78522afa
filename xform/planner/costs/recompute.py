"""The price of recomputing an equation of the forward pass, in bytes of saved values.

The planner saves the values whose bytes are less than the price of recomputing them. There are
three kinds of equations:

- XLA fuses elementwise operations, reductions and movements of data with their readers. Recomputing
  such an operation takes no more passes over memory than saving its result. Its price is small.
- Products, convolutions, sorts, factorizations, random numbers, loops and calls have a price for
  each FLOP.
- Collectives, kernels and callbacks have an infinite price. Only a policy that decides about each
  value on its own may recompute them. Equations that are not repeatable have an infinite price too,
  and no policy recomputes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from xform._jax import JaxprEqn
from xform.interpret.cost import aval_bytes, equation_bytes, equation_flops
from xform.interpret.node import user_equation
from xform.passes.structured import called_body
from xform.registry.repeatable import repeatable
from xform.registry.table import traits

# The prices of a fused equation and of a fused reduction, for each byte of their memory traffic.
_FUSED, _REDUCED = 1 / 1024, 1 / 64
# A GPU or TPU computes about this many FLOPs of products in the time of one integer operation of a
# random number. On an H100 the ratio is 59.
_DRAW = 32


def fusible(eqn: JaxprEqn) -> bool:
    """Return whether XLA fuses an equation with the readers of its result.

    A call is fused if all equations of its body are.
    """
    properties = traits(eqn.primitive)
    if eqn.effects:
        return False
    if properties.call and properties.pure:
        return all(map(fusible, called_body(eqn).equations))
    return properties.fusible and properties.repeatable is True


def price(eqn: JaxprEqn, flop_price: float = math.inf) -> float:
    """Return the price of recomputing an equation, in bytes of saved values.

    `flop_price` is the price of one FLOP of an equation that XLA does not fuse. An equation that
    XLA fuses has a small price. Therefore the saved bytes decide, and of two plans with equal bytes
    the one with less work is cheaper. The price of a reduction is higher, so its small result, such
    as the mean of each row, is saved.
    """
    if fusible(eqn):
        return _fused_price(eqn)
    if flop_price == math.inf or not recomputable(eqn):
        return math.inf
    equation = user_equation(eqn)
    result_bytes = sum(aval_bytes(v.aval) for v in equation.outvars)
    return flop_price * _work(equation) + _FUSED * result_bytes


def _work(eqn: JaxprEqn) -> int:
    """Return the FLOPs of products that take as long as an equation that XLA does not fuse."""
    return equation_flops(eqn) * (_DRAW if traits(eqn.primitive).random else 1)


class Prices:
    """The prices of recomputing some equations, as arrays that are computed once.

    `at` returns them for any price of a FLOP and any price of slow functions such as `exp`. If the
    price of slow functions is 0, it returns the same prices as the function `price`.
    """

    def __init__(self, equations: Sequence[JaxprEqn]):
        self._fixed = np.asarray([price(eqn, 0.0) for eqn in equations], np.float64)
        has_work = [not fusible(eqn) and recomputable(eqn) for eqn in equations]
        pairs = zip(equations, has_work, strict=True)
        self._has_work = np.asarray(has_work, bool)
        self._flops = np.asarray([_work(user_equation(e)) if on else 0 for e, on in pairs])
        self._slow_bytes = np.asarray([_slow_bytes(e) for e in equations], np.float64)

    def is_early(self, fraction: float) -> np.ndarray:
        """Return which equations come before a place of the program.

        A `fraction` of the equations that XLA does not fuse come before the place, and the next one
        of these comes right after it.
        """
        numbers = np.cumsum(self._has_work)
        return numbers <= fraction * numbers[-1] if len(numbers) else numbers.astype(bool)

    def at(self, flop_prices: np.ndarray, slow_price: float = 0.0) -> np.ndarray:
        """Return the price of each equation.

        `flop_prices` holds one price of a FLOP for each equation. `slow_price` is the price of each
        byte that a slow elementwise function, such as `exp`, computes.
        """
        infinite = np.isinf(flop_prices)
        # Do not multiply an infinite price by the FLOPs: infinity times 0 is NaN.
        work = np.where(infinite, math.inf, np.where(infinite, 0, flop_prices) * self._flops)
        fixed = self._fixed + slow_price * self._slow_bytes
        return np.where(self._has_work, work + fixed, fixed)


def recomputable(eqn: JaxprEqn) -> bool:
    """Return whether a minimum cut or a budget may recompute an equation.

    They do not recompute effects, collectives, kernels and callbacks.
    """
    equation = user_equation(eqn)
    allowed = not equation.effects and traits(equation.primitive).recomputable
    return allowed and repeatable(eqn)


def _fused_price(eqn: JaxprEqn) -> float:
    """Return the price of an equation that XLA fuses: a small factor times its memory traffic."""
    properties = traits(eqn.primitive)
    if properties.call:
        return sum(map(_fused_price, called_body(eqn).equations))
    return (_REDUCED if properties.fusion == "reduction" else _FUSED) * equation_bytes(eqn)


def _slow_bytes(eqn: JaxprEqn) -> float:
    """Return the bytes that slow elementwise functions compute in an equation that XLA fuses.

    For an equation that XLA does not fuse, the result is 0.
    """
    properties = traits(eqn.primitive)
    if not fusible(eqn):
        return 0
    if properties.call:
        return sum(map(_slow_bytes, called_body(eqn).equations))
    return equation_bytes(eqn) if properties.expensive else 0
