"""Why some derivatives miss the bar."""

from __future__ import annotations

from experiments.accuracy.measure import Row

_SATURATED = (
    "the formula reads the output alone, which is 1 to the last place; from the input it would "
    "take an exponential more, and the input would be saved as well as the output"
)
_CANCELS = (
    "the two Bessel functions cancel where no expansion is used; no primitive computes the rest"
)
_SQUARED = "exp multiplies the rounding of the square in its argument"
_EDGE = "a power that is formed on the way is beyond the range of the type, in the last binades"
_REWRITTEN = "under jit XLA divides by the product of two divisors, in the last binades"
_DENSITY = "exp multiplies the rounding of the sum of logarithms in its argument"
_POLYGAMMA = (
    "JAX makes polygamma of its zeta, which has no value at negative arguments, and overflows or "
    "underflows on the way at large ones"
)
# By derivative, or by function.
REASONS = {
    "tanh": _SATURATED,
    "bessel_i0e": _CANCELS,
    "bessel_i1e": _CANCELS,
    "erf da da": _EDGE,
    "erfc da da": _EDGE,
    "erf_inv": _SQUARED,
    "pow": _EDGE,
    "integer_pow -1": _EDGE,
    "integer_pow -2": _EDGE,
    "integer_pow -3": _EDGE,
    "integer_pow 3": _EDGE,
    "integer_pow 7": _EDGE,
    "sqrt da da": _EDGE,
    "rsqrt da da": _EDGE,
    "acosh da da": _EDGE,
    "log da da": _REWRITTEN,
    "log2 da da": _REWRITTEN,
    "div": _REWRITTEN,
    "cbrt": "the error of the cube root counts twice, in the second derivative five times",
    "rem db": "the quotient is rounded before its whole part is taken",
    "lgamma": _POLYGAMMA,
    "digamma": _POLYGAMMA,
    "polygamma 1": _POLYGAMMA,
    "polygamma 3": _POLYGAMMA,
    "zeta": _POLYGAMMA,
    "igamma": _DENSITY,
    "igammac": _DENSITY,
    "igamma_grad_a": _DENSITY,
    "betainc 2.0, 3.0": _DENSITY,
    "betainc 7.5, 0.25": _DENSITY,
}


def reason(row: Row) -> str:
    """Return the reason why a row misses the bar."""
    return REASONS.get(row.name, REASONS.get(row.function, "UNKNOWN"))
