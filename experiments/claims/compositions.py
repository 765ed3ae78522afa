"""Every order of four transforms, up to depth three, against a reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict

Function = Callable[[jax.Array], jax.Array]
X = np.linspace(0.3, 1.7, 8)
DEPTH = 3


def f(x: jax.Array) -> jax.Array:
    """A scalar function with a loop, a branch and a product."""

    def step(y: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        return jnp.where(i % 2 == 0, jnp.sin(y) * x, y * y + x), None

    return jax.lax.scan(step, x, jnp.arange(3))[0]


def applied(ours: Any, names: tuple[str, ...]) -> Any:
    """Apply transforms of `ours` to the function, the last name outermost, at a batch of points.

    `vmap` maps over a copy of each point, so any number of them nest.
    """

    def mapped(g: Function) -> Function:
        return lambda x: jax.vmap(g)(jnp.stack([x, 2 * x])).sum()

    transforms: dict[str, Any] = {
        "jit": jax.jit,
        "grad": ours.grad,
        "vmap": mapped,
        "jvp": lambda g: lambda x: ours.jvp(g, (x,), (jnp.ones_like(x),))[1],
    }
    g: Any = f
    for name in names:
        g = transforms[name](g)
    return lambda xs: jnp.stack([g(x) for x in xs])


def measure(quick: bool) -> Finding:
    """Measure the largest relative difference from JAX in float64, over every order."""
    names = ("jit", "grad", "vmap", "jvp")
    orders = [o for n in range(1, DEPTH + 1) for o in itertools.product(names, repeat=n)]
    some = X[:2] if quick else X
    apart: dict[tuple[str, ...], float] = {}
    with jax.enable_x64():
        for order in orders:
            ours, theirs = (np.asarray(applied(who, order)(some)) for who in (xform, jax))
            apart[order] = float(np.max(np.abs(ours - theirs) / np.abs(theirs)))
    worst = max(apart.values())
    equal = sum(value < 1e-12 for value in apart.values())
    return Finding(
        [
            Claim(
                "jit(grad(vmap(f))) and every other order of transforms can be written",
                "Frostig, Johnson, Leary, Compiling machine learning programs via high-level"
                " tracing, 2018",
                f"all {len(orders)} orders of jit, grad, vmap and jvp to depth {DEPTH}",
                f"{equal} equal JAX's in float64 within 1e-12, {worst:.0e} at worst",
                verdict(equal == len(orders), f"wrong for {len(orders) - equal}"),
            )
        ],
        lambda figure: draw(figure, apart),
    )


def draw(figure: Figure, apart: dict[tuple[str, ...], float]) -> None:
    """Draw the differences, in the order of depth."""
    axes = figure.subplots()
    axes.semilogy([max(v, 1e-17) for v in apart.values()], ".", color="#2b6cb0")
    axes.axhline(1e-12, color="gray", linewidth=0.8)
    axes.set(xlabel="order of transforms, from depth 1 to 3",
             ylabel="relative difference from JAX")  # fmt: skip
