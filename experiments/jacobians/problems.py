"""Small programs whose Jacobians are standard problems of vertex elimination.

They are rewritten from these sources: Helmholtz free energy of a mixture (Griewank and Walther,
"Evaluating Derivatives", section 1.3); Roe, "Approximate Riemann solvers", J. Comput. Phys. 43
(1981); a robot arm of six joints by Denavit and Hartenberg's parameters; the human heart dipole and
Brown's almost linear function (More, Garbow and Hillstrom; the MINPACK-2 collection); Black and
Scholes (1973).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def helmholtz(x: Any) -> Any:
    """Compute the terms of the ideal part of a mixture's free energy, in 4 concentrations."""
    share = 1 - jnp.sum(x)
    return x * jnp.log(x / share)


def mixture(x: Any) -> Any:
    """Compute the whole free energy, a scalar, with an attraction of van der Waals' type."""
    a = jnp.array(np.linspace(0.1, 1.6, 16).reshape(4, 4))
    b = jnp.array([0.1, 0.2, 0.15, 0.05])
    volume, root = jnp.dot(b, x), math.sqrt(2)
    ideal = jnp.sum(x * jnp.log(x / (1 - volume)))
    ratio = (1 + (1 + root) * volume) / (1 + (1 - root) * volume)
    return ideal - jnp.dot(x, a @ x) / (math.sqrt(8) * volume) * jnp.log(ratio)


def roe_flux(x: Any) -> Any:
    """Compute the flux of one-dimensional gas dynamics from two states of three numbers."""
    gamma = 1.4
    (rl, ml, el), (rr, mr, er) = (x[0], x[1], x[2]), (x[3], x[4], x[5])

    def known(r: Any, m: Any, e: Any) -> Any:
        u = m / r
        p = (gamma - 1) * (e - 0.5 * r * u * u)
        return u, p, (e + p) / r

    ul, pl, hl = known(rl, ml, el)
    ur, pr, hr = known(rr, mr, er)
    wl, wr = jnp.sqrt(rl), jnp.sqrt(rr)
    total = wl + wr
    u, h = (wl * ul + wr * ur) / total, (wl * hl + wr * hr) / total
    c2 = (gamma - 1) * (h - 0.5 * u * u)
    c, r = jnp.sqrt(c2), wl * wr
    dp, du, dr = pr - pl, ur - ul, rr - rl
    waves = (dp - r * c * du) / (2 * c2), dr - dp / c2, (dp + r * c * du) / (2 * c2)
    speeds = jnp.abs(u - c), jnp.abs(u), jnp.abs(u + c)
    k1, k2, k3 = (w * s for w, s in zip(waves, speeds, strict=True))
    left = ml, ml * ul + pl, ml * hl
    right = mr, mr * ur + pr, mr * hr
    jump = (k1 + k2 + k3, k1 * (u - c) + k2 * u + k3 * (u + c),
            k1 * (h - u * c) + k2 * 0.5 * u * u + k3 * (h + u * c))  # fmt: skip
    return jnp.stack([0.5 * (a + b - d) for a, b, d in zip(left, right, jump, strict=True)])


def robot_arm(q: Any) -> Any:
    """Compute position and direction of the hand of an arm with six joints."""
    lengths, offsets = (0.0, 0.4, 0.05, 0.0, 0.0, 0.0), (0.3, 0.0, 0.0, 0.35, 0.0, 0.1)
    twists = (math.pi / 2, 0.0, math.pi / 2, -math.pi / 2, math.pi / 2, 0.0)
    one, zero = jnp.ones_like(q[0]), jnp.zeros_like(q[0])
    rows = [[one, zero, zero, zero], [zero, one, zero, zero], [zero, zero, one, zero]]
    for i in range(6):
        c, s = jnp.cos(q[i]), jnp.sin(q[i])
        ca, sa = math.cos(twists[i]), math.sin(twists[i])
        step = [[c, -s * ca, s * sa, lengths[i] * c], [s, c * ca, -c * sa, lengths[i] * s],
                [zero, sa * one, ca * one, offsets[i] * one]]  # fmt: skip
        rows = [[row[0] * step[0][k] + row[1] * step[1][k] + row[2] * step[2][k]
                 + (row[3] if k == 3 else 0.0) for k in range(4)] for row in rows]  # fmt: skip
    return jnp.stack([*(row[3] for row in rows), *(row[2] for row in rows)])


def heart_dipole(x: Any) -> Any:
    """Compute the eight equations of the human heart dipole."""
    a, b, c, d, t, u, v, w = (x[i] for i in range(8))
    return jnp.stack([
        a + b - 0.63,
        c + d + 0.67,
        t * a + u * b - v * c - w * d + 1.2,
        v * a + w * b + t * c + u * d - 0.36,
        a * (t * t - v * v) - 2 * c * t * v + b * (u * u - w * w) - 2 * d * u * w - 0.43,
        c * (t * t - v * v) + 2 * a * t * v + d * (u * u - w * w) + 2 * b * u * w - 0.32,
        a * t * (t * t - 3 * v * v) + c * v * (v * v - 3 * t * t) + b * u * (u * u - 3 * w * w)
        + d * w * (w * w - 3 * u * u) + 0.77,
        c * t * (t * t - 3 * v * v) - a * v * (v * v - 3 * t * t) + d * u * (u * u - 3 * w * w)
        - b * w * (w * w - 3 * u * u) - 0.34,
    ])  # fmt: skip


def black_scholes(x: Any) -> Any:
    """Compute the price of a call option and its sensitivities: a Jacobian of gradients."""

    def price(x: Any) -> Any:
        spot, strike, rate, sigma, time = (x[i] for i in range(5))
        root = sigma * jnp.sqrt(time)
        d1 = (jnp.log(spot / strike) + (rate + sigma * sigma / 2) * time) / root
        normal = lambda z: 0.5 * (1 + jax.lax.erf(z / math.sqrt(2)))
        return spot * normal(d1) - strike * jnp.exp(-rate * time) * normal(d1 - root)

    return jnp.stack([price(x), price(x * 1.01)])


def brown(x: Any) -> Any:
    """Compute Brown's almost linear function of six numbers."""
    return jnp.concatenate([x[:-1] + jnp.sum(x) - 7, jnp.prod(x)[None] - 1])


def perceptron(x: Any) -> Any:
    """Compute two layers, and a loss for each of 3 outputs."""
    w = jnp.array(np.linspace(-1, 1, 20).reshape(5, 4))
    v = jnp.array(np.linspace(1, -1, 15).reshape(3, 5))
    return jax.nn.log_softmax(v @ jnp.tanh(w @ x))


PROBLEMS: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "Helmholtz free energy": (helmholtz, [0.1, 0.2, 0.25, 0.15]),
    "Helmholtz, of a mixture": (mixture, [0.1, 0.2, 0.25, 0.15]),
    "Roe flux, 1D": (roe_flux, [1.0, 0.3, 2.5, 0.8, 0.2, 2.0]),
    "robot arm, 6 joints": (robot_arm, [0.1, -0.4, 0.7, 0.3, -0.2, 0.5]),
    "human heart dipole": (heart_dipole, [0.3, 0.4, -0.2, -0.5, 0.9, 0.6, 1.1, -0.7]),
    "Black-Scholes": (black_scholes, [100.0, 110.0, 0.02, 0.3, 1.5]),
    "Brown, almost linear": (brown, [0.9, 1.1, 1.0, 1.2, 0.8, 1.05]),
    "perceptron": (perceptron, [0.3, -0.1, 0.5, 0.2]),
}
