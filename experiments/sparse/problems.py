"""Functions with sparse derivatives, from the literature and from other libraries' test suites.

`size` is the approximate number of inputs of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Point = tuple[Callable[..., Any], jax.Array]


def tridiagonal(size: int) -> Point:
    """Return Broyden's tridiagonal function."""

    def f(x: Any) -> Any:
        y = jnp.pad(x, 1)
        return (3 - 2 * x) * x - y[:-2] - 2 * y[2:] + 1

    return f, points(size)


def heat(size: int) -> Point:
    """Return the heat equation on a line, with fixed ends."""

    def f(u: Any) -> Any:
        first, last = u[1:2] - 2 * u[:1], u[-2:-1] - 2 * u[-1:]
        return jnp.concatenate([first, u[:-2] - 2 * u[1:-1] + u[2:], last])

    return f, points(size)


def banded(size: int) -> Point:
    """Return Broyden's banded function: five neighbours below and one above."""

    def f(x: Any) -> Any:
        y = jnp.pad(x * (1 + x), (5, 1))
        around = sum(y[5 + k : 5 + k + len(x)] for k in (-5, -4, -3, -2, -1, 1))
        return x * (2 + 5 * x**2) + 1 - around

    return f, points(size)


def five_points(size: int) -> Point:
    """Return Bratu's problem: a Laplacian of five points, and an exponential."""

    def f(u: Any) -> Any:
        v = jnp.pad(u, 1)
        spread = v[2:, 1:-1] + v[:-2, 1:-1] + v[1:-1, 2:] + v[1:-1, :-2] - 4 * u
        return spread + jnp.exp(u)

    side = round(size**0.5)
    return f, points(side, side)


def brusselator(size: int) -> Point:
    """Return two substances on a torus, from the test suite of SparseConnectivityTracer."""

    def f(uv: Any) -> Any:
        u, v = uv
        spread = lambda a: sum(jnp.roll(a, s, i) for i in (0, 1) for s in (1, -1)) - 4 * a
        return jnp.stack(
            [
                1 + u * u * v - 4.4 * u + 10 * spread(u),
                3.4 * u - u * u * v + 10 * spread(v),
            ]
        )

    side = round((size / 2) ** 0.5)
    return f, points(2, side, side)


def arrow(size: int) -> Point:
    """Return a function with a diagonal, a full row and a full column."""

    def f(x: Any) -> Any:
        return (x**2 + x[0] * x).at[0].set(jnp.sum(x**2))

    return f, points(size)


def convolutions(size: int) -> Point:
    """Return three layers of convolutions on a line, from the test suite of asdex."""
    shapes = ((5, 1, 8), (3, 8, 4), (3, 4, 2))
    kernels = [np.sin(np.arange(1.0, 1 + np.prod(s))).reshape(s) for s in shapes]

    def f(x: Any) -> Any:
        y = x[None, :, None]
        for kernel in kernels:
            y = lax.conv_general_dilated(
                y, kernel.astype(x.dtype), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )
            y = jax.nn.relu(y)
        return y.ravel()

    return f, points(size)


def steps(size: int) -> Point:
    """Return four explicit steps of the heat equation, as a loop."""
    right, _ = heat(size)
    f = lambda u: lax.scan(lambda u, _: (u + 0.1 * right(u), None), u, None, length=4)[0]
    return f, points(size)


def rosenbrock(size: int) -> Point:
    """Return the chained Rosenbrock function."""
    f = lambda x: jnp.sum((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2)
    return f, points(size)


def membrane(size: int) -> Point:
    """Return the area of a surface over a grid."""

    def f(u: Any) -> Any:
        across, down = u[1:, 1:] - u[:-1, 1:], u[1:, 1:] - u[1:, :-1]
        return jnp.sum(jnp.sqrt(1 + across**2 + down**2))

    side = round(size**0.5)
    return f, points(side, side)


def points(*shape: int) -> jax.Array:
    """Return numbers between 0.5 and 1.5."""
    return jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, shape))


JACOBIANS = {
    "tridiagonal": tridiagonal,
    "heat, on a line": heat,
    "banded, 5 below and 1 above": banded,
    "Laplacian of 5 points": five_points,
    "Brusselator": brusselator,
    "arrow": arrow,
    "three convolutions": convolutions,
    "four steps of heat": steps,
}
HESSIANS = {"Rosenbrock": rosenbrock, "membrane": membrane}
