"""Elementwise functions, their derivatives in mpmath, and their domains.

The derivatives are written from textbooks, not from the rules. A test compares each with finite
differences of the function. M. Abramowitz and I. Stegun, Handbook of Mathematical Functions
(1964), sections 4 (elementary), 6 (gamma), 7 (erf), 9 (Bessel), 23 and 26 (zeta, beta).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from mpmath import mp

from experiments.accuracy import pairs

INF = float("inf")
Formula = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of one primitive.

    Attributes:
      name: its name in the table.
      primitive: the primitive that it binds.
      f: the function, of arrays.
      value: the same function in mpmath.
      derivatives: in mpmath, by their arguments: `(0,)`, `(0, 0)`.
      domain: the ends of an open interval for each argument.
      special: points near which errors are measured too.
      defined: whether it has derivatives at a point of the domain.
      paired: makes the second argument for a first, from two arrays drawn independently.
    """

    name: str
    primitive: str
    f: Formula
    value: Formula
    derivatives: dict[tuple[int, ...], Formula]
    domain: Sequence[tuple[float, float]] = ((-INF, INF),)
    special: Sequence[float] = (0.0, 1.0, -1.0)
    defined: Callable[..., bool] = lambda *x: True
    paired: pairs.Paired = pairs.independent


def unary(name: str, value: Formula, first: Formula, second: Formula, low: float = -INF,
          high: float = INF, f: Formula | None = None, primitive: str | None = None,
          **fields: Any) -> Function:  # fmt: skip
    """Return a function of one argument."""
    f = getattr(lax, name) if f is None else f
    derivatives = {(0,): first, (0, 0): second}
    return Function(name, primitive or name, f, value, derivatives, ((low, high),), **fields)


def power(x: Any, e: str) -> Any:
    """Compute |x| to a power that is given as a fraction in text."""
    return mp.power(abs(x), mp.fraction(*map(int, e.split("/"))))


def half(x: Any) -> Any:
    """Compute exp(-|x|) / (1 + exp(-|x|))², the slope of the logistic function."""
    small = mp.exp(-abs(x))
    return small / (1 + small) ** 2


def sech(x: Any) -> Any:
    return 1 / mp.cosh(x)


def polygamma(m: int, x: Any) -> Any:
    """Compute ψ of order 0, 1 or 2; for negative x by reflection."""
    if x > 0 or m == 0:
        return mp.psi(m, x)
    sine, cosine = mp.sinpi(x), mp.cospi(x)
    if m == 1:
        return (mp.pi / sine) ** 2 - mp.psi(1, 1 - x)
    return mp.psi(2, 1 - x) - 2 * mp.pi**3 * cosine / sine**3


def gamma_density(a: Any, x: Any) -> Any:
    """x^(a-1) exp(-x) / Γ(a)."""
    with mp.extraprec(64):
        return mp.exp((a - 1) * mp.log(x) - x - mp.loggamma(a))


def incomplete_gamma(a: Any, x: Any) -> Any:
    """The regularized lower incomplete gamma function P(a, x)."""
    return mp.gammainc(a, 0, x, regularized=True) if x < a + 40 else 1 - complement(a, x)


def complement(a: Any, x: Any) -> Any:
    """The regularized upper incomplete gamma function Q(a, x)."""
    if x < a + 40:
        return 1 - mp.gammainc(a, 0, x, regularized=True)
    return mp.gammainc(a, x, mp.inf, regularized=True)


def gamma_slope(a: Any, x: Any) -> Any:
    """Compute the slope of P(a, x) in a, by a finite difference with 50% more digits."""
    bits = mp.prec // 2
    with mp.extraprec(bits):
        h = mp.ldexp(a, -bits)
        part, sign = (incomplete_gamma, 1) if x < a + 40 else (complement, -1)
        return sign * (part(a + h, x) - part(a - h, x)) / (2 * h)


def beta_density(a: Any, b: Any, x: Any) -> Any:
    """x^(a-1) (1-x)^(b-1) / B(a, b)."""
    with mp.extraprec(64):
        beta = mp.loggamma(a) + mp.loggamma(b) - mp.loggamma(a + b)
        return mp.exp((a - 1) * mp.log(x) + (b - 1) * mp.log1p(-x) - beta)


def bessel(order: int, x: Any, derivative: int) -> Any:
    """Compute a derivative of exp(-|x|) I(|x|), whose parity is that of the order.

    For a large argument it uses Hankel's expansion, term by term, because the difference of the two
    orders would cancel there.
    """
    sign = mp.sign(x) if (order + derivative) % 2 else 1
    x = abs(x)
    if x > 80:
        total, term, k = mp.mpf(0), 1 / mp.sqrt(2 * mp.pi * x), 0
        while k < 100 and abs(term) > mp.eps * abs(total) * mp.eps:
            e = -mp.mpf(k) - 0.5
            total += term * (1, e / x, e * (e - 1) / x**2)[derivative]
            k += 1
            term *= -(4 * order**2 - (2 * k - 1) ** 2) / (8 * k * x)
        return sign * total
    with mp.extraprec(64):
        i = [mp.besseli(order + k, x) for k in (-2, -1, 0, 1, 2)]
        once, twice = (i[1] + i[3]) / 2, (i[0] + 2 * i[2] + i[4]) / 4
        return sign * mp.exp(-x) * (i[2], once - i[2], twice - 2 * once + i[2])[derivative]


def hurwitz(s: Any, q: Any) -> Any:
    """Compute ζ(s, q): its first terms directly, the others by Euler and Maclaurin's formula."""
    first = max(16, int(s / 3 - q)) if s < 30_000 else 1
    total = mp.mpf(0)
    for k in range(first):
        term = mp.power(q + k, -s)
        total += term
        if term < mp.eps * total:
            return total
    end = q + first
    power = mp.power(end, -s)
    total += power * (end / (s - 1) + mp.mpf(1) / 2)
    term = s * power / end
    for k in range(1, 24):
        total += COEFFICIENTS[k] * term
        term *= (s + 2 * k - 1) * (s + 2 * k) / end**2
    return total


with mp.workprec(400):
    COEFFICIENTS = [mp.bernoulli(2 * k) / mp.factorial(2 * k) for k in range(24)]


def integer_pow(n: int) -> Function:
    value = lambda e: lambda x: mp.power(x, e)
    return unary(
        f"integer_pow {n}", value(n), lambda x: n * mp.power(x, n - 1),
        lambda x: n * (n - 1) * mp.power(x, n - 2), f=lambda x: lax.integer_pow(x, n),
        primitive="integer_pow", defined=lambda x: x != 0,
    )  # fmt: skip


def is_pole(x: float) -> bool:
    return x <= 0 and x == int(x)


def _missing(name: str) -> bool:
    """Return whether this version of JAX lacks the primitive."""
    return not hasattr(lax, name)


LOG2 = lambda: mp.log(2)
UNARY = [
    unary("neg", lambda x: -x, lambda x: mp.mpf(-1), lambda x: mp.mpf(0)),
    unary("abs", abs, mp.sign, lambda x: mp.mpf(0), defined=lambda x: x != 0),
    unary("square", lambda x: x * x, lambda x: 2 * x, lambda x: mp.mpf(2)),
    unary("sqrt", mp.sqrt, lambda x: 1 / (2 * mp.sqrt(x)),
          lambda x: -power(x, "-3/2") / 4, 0),
    unary("rsqrt", lambda x: 1 / mp.sqrt(x), lambda x: -power(x, "-3/2") / 2,
          lambda x: 3 * power(x, "-5/2") / 4, 0),
    unary("cbrt", lambda x: mp.sign(x) * power(x, "1/3"), lambda x: power(x, "-2/3") / 3,
          lambda x: -2 * mp.sign(x) * power(x, "-5/3") / 9, defined=lambda x: x != 0),
    *map(integer_pow, (2, 3, 7, -1, -2, -3)),
    unary("exp", mp.exp, mp.exp, mp.exp),
    unary("exp2", lambda x: mp.power(2, x), lambda x: LOG2() * mp.power(2, x),
          lambda x: LOG2() ** 2 * mp.power(2, x), special=(0.0, 1.0, 1024.0, 128.0, 16.0)),
    unary("expm1", mp.expm1, mp.exp, mp.exp),
    unary("log", mp.log, lambda x: 1 / x, lambda x: -1 / x**2, 0),
    unary("log1p", mp.log1p, lambda x: 1 / (1 + x), lambda x: -1 / (1 + x) ** 2, -1),
    unary("logistic", lambda x: 1 / (1 + mp.exp(-x)), half,
          lambda x: -half(x) * mp.tanh(x / 2)),
    unary("sin", mp.sin, mp.cos, lambda x: -mp.sin(x), special=(0.0, *pairs.TURNS)),
    unary("cos", mp.cos, lambda x: -mp.sin(x), lambda x: -mp.cos(x),
          special=(0.0, *pairs.TURNS)),
    unary("tan", mp.tan, lambda x: 1 / mp.cos(x) ** 2, lambda x: 2 * mp.tan(x) / mp.cos(x) ** 2,
          special=(0.0, *pairs.TURNS)),
    unary("asin", mp.asin, lambda x: power(1 - x * x, "-1/2"),
          lambda x: x * power(1 - x * x, "-3/2"), -1, 1),
    unary("acos", mp.acos, lambda x: -power(1 - x * x, "-1/2"),
          lambda x: -x * power(1 - x * x, "-3/2"), -1, 1),
    unary("atan", mp.atan, lambda x: 1 / (1 + x * x), lambda x: -2 * x / (1 + x * x) ** 2),
    unary("sinh", mp.sinh, mp.cosh, mp.sinh),
    unary("cosh", mp.cosh, mp.sinh, mp.cosh),
    unary("tanh", mp.tanh, lambda x: sech(x) ** 2, lambda x: -2 * mp.tanh(x) * sech(x) ** 2),
    unary("asinh", mp.asinh, lambda x: power(1 + x * x, "-1/2"),
          lambda x: -x * power(1 + x * x, "-3/2")),
    unary("acosh", mp.acosh, lambda x: power(x * x - 1, "-1/2"),
          lambda x: -x * power(x * x - 1, "-3/2"), 1),
    unary("atanh", mp.atanh, lambda x: 1 / (1 - x * x), lambda x: 2 * x / (1 - x * x) ** 2, -1, 1),
    unary("lgamma", lambda x: mp.re(mp.loggamma(x)), lambda x: polygamma(0, x),
          lambda x: polygamma(1, x), special=(0.0, 1.0, 2.0, 1.4616321449683622, -1.0, -2.0),
          defined=lambda x: not is_pole(x)),
    unary("digamma", lambda x: polygamma(0, x), lambda x: polygamma(1, x),
          lambda x: polygamma(2, x), special=(0.0, 1.0, 1.4616321449683622, -1.0, -2.0),
          defined=lambda x: not is_pole(x)),
    unary("erf", mp.erf, lambda x: 2 / mp.sqrt(mp.pi) * mp.exp(-x * x),
          lambda x: -4 * x / mp.sqrt(mp.pi) * mp.exp(-x * x)),
    unary("erfc", mp.erfc, lambda x: -2 / mp.sqrt(mp.pi) * mp.exp(-x * x),
          lambda x: 4 * x / mp.sqrt(mp.pi) * mp.exp(-x * x)),
    unary("erf_inv", mp.erfinv, lambda x: mp.sqrt(mp.pi) / 2 * mp.exp(mp.erfinv(x) ** 2),
          lambda x: mp.pi / 2 * mp.erfinv(x) * mp.exp(2 * mp.erfinv(x) ** 2), -1, 1),
    *(unary(f"bessel_i{n}e", *(lambda x, n=n, k=k: bessel(n, x, k) for k in range(3)),
            defined=lambda x: x != 0) for n in (0, 1)),
    *(unary(f"polygamma {m}", lambda x, m=m: mp.psi(m, x), lambda x, m=m: mp.psi(m + 1, x),
            lambda x, m=m: mp.psi(m + 2, x), 0, primitive="polygamma",
            f=lambda x, m=m: lax.polygamma(jnp.full_like(x, m), x)) for m in (1, 3)),
]  # fmt: skip
if not _missing("log2"):
    UNARY.append(unary("log2", lambda x: mp.log(x) / LOG2(), lambda x: 1 / (x * LOG2()),
                       lambda x: -1 / (x * x * LOG2()), 0))  # fmt: skip
if not _missing("one_minus_square"):
    UNARY.append(unary("one_minus_square", lambda x: 1 - x * x, lambda x: -2 * x,
                       lambda x: mp.mpf(-2)))  # fmt: skip
if not _missing("polynomial"):
    UNARY.append(unary(
        "polynomial", lambda x: x**3 + 2 * x * x + 3 * x + 4, lambda x: 3 * x * x + 4 * x + 3,
        lambda x: 6 * x + 4, f=lambda x: lax.polynomial(x, [jnp.full_like(x, c)
                                                            for c in (1, 2, 3, 4)])))  # fmt: skip

# mpmath cannot compute the incomplete gamma function at huge arguments.
REAL, POSITIVE, MODERATE = (-INF, INF), (0.0, INF), (0.0, 1000.0)
zero = lambda *x: mp.mpf(0)


def binary(name: str, value: Formula, derivatives: dict[tuple[int, ...], Formula],
           f: Formula | None = None, domain: Sequence[tuple[float, float]] = (REAL, REAL),
           **fields: Any) -> Function:  # fmt: skip
    """Return a function of two arguments."""
    return Function(name, name, f or getattr(lax, name), value, derivatives, domain, **fields)


def quotient(a: Any, b: Any) -> Any:
    """Compute a / b, rounded towards zero."""
    q = a / b
    return mp.floor(q) if q > 0 else mp.ceil(q)


BINARY = [
    binary("add", lambda a, b: a + b, {(0,): lambda a, b: mp.mpf(1), (1,): lambda a, b: mp.mpf(1)}),
    binary("sub", lambda a, b: a - b, {(0,): lambda a, b: mp.mpf(1),
                                       (1,): lambda a, b: mp.mpf(-1)}),
    binary("mul", lambda a, b: a * b, {(0,): lambda a, b: b, (1,): lambda a, b: a,
                                       (0, 1): lambda a, b: mp.mpf(1)}),
    binary("div", lambda a, b: a / b, {
        (0,): lambda a, b: 1 / b, (1,): lambda a, b: -a / b**2, (0, 1): lambda a, b: -1 / b**2,
        (1, 1): lambda a, b: 2 * a / b**3}, defined=lambda a, b: b != 0),
    binary("rem", lambda a, b: a - b * quotient(a, b), {
        (0,): lambda a, b: mp.mpf(1), (1,): lambda a, b: -quotient(a, b)},
        defined=lambda a, b: b != 0, paired=pairs.near),
    binary("pow", mp.power, {
        (0,): lambda a, b: b * mp.power(a, b - 1), (1,): lambda a, b: mp.log(a) * mp.power(a, b),
        (0, 0): lambda a, b: b * (b - 1) * mp.power(a, b - 2),
        (0, 1): lambda a, b: mp.power(a, b - 1) * (1 + b * mp.log(a)),
        (1, 1): lambda a, b: mp.log(a) ** 2 * mp.power(a, b)},
        domain=(POSITIVE, REAL), paired=pairs.exponents),
    binary("atan2", mp.atan2, {
        (0,): lambda a, b: b / (a * a + b * b), (1,): lambda a, b: -a / (a * a + b * b),
        (0, 0): lambda a, b: -2 * a * b / (a * a + b * b) ** 2,
        (0, 1): lambda a, b: (a - b) * (a + b) / (a * a + b * b) ** 2,
        (1, 1): lambda a, b: 2 * a * b / (a * a + b * b) ** 2},
        defined=lambda a, b: a != 0 and b != 0, paired=pairs.near),
    *(binary(name, pick, {(0,): lambda a, b, pick=pick: mp.mpf(pick(a, b) == a),
                          (1,): lambda a, b, pick=pick: mp.mpf(pick(a, b) == b)},
             defined=lambda a, b: a != b) for name, pick in (("max", max), ("min", min))),
    binary("zeta", hurwitz, {(1,): lambda s, q: -s * hurwitz(s + 1, q),
                             (1, 1): lambda s, q: s * (s + 1) * hurwitz(s + 2, q)},
           domain=((1.0, INF), POSITIVE), paired=pairs.moderate),
    binary("igamma", incomplete_gamma, {
        (0,): gamma_slope, (1,): gamma_density,
        (1, 1): lambda a, x: gamma_density(a, x) * ((a - 1) / x - 1),
        (0, 1): lambda a, x: gamma_density(a, x) * (mp.log(x) - mp.psi(0, a))},
        domain=(MODERATE, MODERATE), paired=pairs.gamma),
    binary("igammac", complement, {
        (0,): lambda a, x: -gamma_slope(a, x), (1,): lambda a, x: -gamma_density(a, x),
        (1, 1): lambda a, x: -gamma_density(a, x) * ((a - 1) / x - 1),
        (0, 1): lambda a, x: -gamma_density(a, x) * (mp.log(x) - mp.psi(0, a))},
        domain=(MODERATE, MODERATE), paired=pairs.gamma),
    binary("igamma_grad_a", gamma_slope, {
        (1,): lambda a, x: gamma_density(a, x) * (mp.log(x) - mp.psi(0, a)),
        (1, 1): lambda a, x: gamma_density(a, x) * (
            ((a - 1) / x - 1) * (mp.log(x) - mp.psi(0, a)) + 1 / x)},
        domain=(MODERATE, MODERATE), paired=pairs.gamma),
    *(Function(
        f"betainc {a}, {b}", "regularized_incomplete_beta",
        lambda x, a=a, b=b: lax.betainc(jnp.full_like(x, a), jnp.full_like(x, b), x),
        lambda x, a=a, b=b: mp.betainc(a, b, 0, x, regularized=True), {
            (0,): lambda x, a=a, b=b: beta_density(mp.mpf(a), mp.mpf(b), x),
            (0, 0): lambda x, a=a, b=b: beta_density(mp.mpf(a), mp.mpf(b), x) * (
                (a - 1) / x - (b - 1) / (1 - x))},
        ((0.0, 1.0),)) for a, b in ((2.0, 3.0), (7.5, 0.25))),
]  # fmt: skip

FUNCTIONS = {f.name: f for f in [*UNARY, *BINARY]}
