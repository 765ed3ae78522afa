"""Forward mode with the columns of the Jacobian one after the other, all at once, and reverse."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, exponent, verdict
from experiments.timing import paired
from xform.interpret.cost import program_flops

LAYERS, WIDTHS = (8, 16, 32, 64), (64, 128, 256, 512)
FIXED_LAYERS, FIXED_WIDTH = 16, 128
KEEP = xform.policies.save_everything


def loss(x: jax.Array, ws: jax.Array) -> jax.Array:
    """Compute a number from layers of as many weights as columns, so that a layer is O(d)."""
    layer = lambda h, w: (jnp.tanh(w * h + jnp.roll(h, 1)), None)
    return jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 2)


def one_by_one(x: jax.Array, ws: jax.Array) -> jax.Array:
    """Compute the derivative by each input in a recursion of its own, one after the other."""

    def column(i: jax.Array) -> jax.Array:
        return xform.jvp(lambda x: loss(x, ws), (x,), (jax.nn.one_hot(i, x.size),))[1]

    return jax.lax.map(column, jnp.arange(x.size))


WAYS = {
    "columns one by one": one_by_one,
    "all columns": xform.jacfwd(loss),
    "reverse": xform.grad(loss, policy=KEEP),
}


def inputs(m: int, d: int) -> tuple[jax.Array, jax.Array]:
    """Return a point of `d` numbers, and `m` layers."""
    return jnp.linspace(-1, 1, d), jax.random.normal(jax.random.key(0), (m, d)) / 2


def size(way: Any, m: int, d: int) -> tuple[int, int]:
    """Return the temporary bytes of the compiled gradient, and its FLOPs."""
    args = jax.eval_shape(lambda: inputs(m, d))
    memory: Any = jax.jit(way).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes, program_flops(way, *args)


def measure(quick: bool) -> Finding:
    """Measure bytes, FLOPs and time over layers and width."""
    sizes = [*((m, FIXED_WIDTH) for m in LAYERS), *((FIXED_LAYERS, d) for d in WIDTHS)]
    found = {name: {s: size(way, *s) for s in sizes} for name, way in WAYS.items()}
    by = {
        name: [(exponent(LAYERS, [rows[m, FIXED_WIDTH][i] for m in LAYERS]),
                exponent(WIDTHS, [rows[FIXED_LAYERS, d][i] for d in WIDTHS])) for i in range(2)]
        for name, rows in found.items()
    }  # fmt: skip
    largest = inputs(LAYERS[-1], WIDTHS[-1])
    runs: dict[str, Any] = {n: jax.jit(way).lower(*largest).compile() for n, way in WAYS.items()}
    for run in runs.values():
        np.testing.assert_allclose(run(*largest), jax.grad(loss)(*largest), rtol=1e-4, atol=1e-5)
    one, every, reverse = WAYS
    n = 3 if quick else 7
    slower = {n_: paired(runs[one], runs[n_], largest, n=n)[0] for n_ in (every, reverse)}
    work = {n_: program_flops(WAYS[one], *largest) / program_flops(WAYS[n_], *largest)
            for n_ in (every, reverse)}  # fmt: skip
    close = lambda a, b: abs(a[0] - b[0]) < 0.25 and abs(a[1] - b[1]) < 0.25
    held = {name: exponents[0] for name, exponents in by.items()}
    said = lambda i: ", ".join(f"{n} ({p[i][0]:.2f}, {p[i][1]:.2f})" for n, p in by.items())
    return Finding(
        [
            Claim(
                "Forward mode needs O(d) memory if the columns of the Jacobian are computed one"
                " after the other, each by its own recursion",
                "lecture notes on automatic differentiation",
                "exponents of compiled temporary bytes (m, d), a gradient along m layers of width"
                " d: one by one (0, 1), all columns (0, 2), reverse (1, 1)",
                said(0),
                verdict(
                    close(held[one], (0, 1))
                    and close(held[every], (0, 2))
                    and close(held[reverse], (1, 1)),
                    f"holds for the columns one by one; all at once ({held[every][0]:.2f},"
                    f" {held[every][1]:.2f}), reverse ({held[reverse][0]:.2f},"
                    f" {held[reverse][1]:.2f})"
                    if close(held[one], (0, 1))
                    else "wrong",
                ),
            ),
            Claim(
                "... and that costs each column a pass of its own",
                "lecture notes on automatic differentiation",
                "exponents of FLOPs (m, d): (1, 2), (1, 2), (1, 1); one by one computes the values"
                " and local derivatives again for each column, which all at once share",
                f"{said(1)}; {LAYERS[-1]} layers, width {WIDTHS[-1]}, one by one over all columns:"
                f" {work[every]:.2f} of the FLOPs, {slower[every]:.2f} of the time; over reverse:"
                f" {work[reverse]:.0f} and {slower[reverse]:.0f}",
                verdict(
                    close(by[one][1], (1, 2)) and close(by[reverse][1], (1, 1)),
                    "wrong",
                ),
            ),
        ],
        lambda figure: draw(figure, found),
    )


def draw(figure: Figure, found: Any) -> None:
    """Draw bytes by layers and by width."""
    left, right = figure.subplots(1, 2, sharey=True)
    for name, rows in found.items():
        left.loglog(LAYERS, [rows[m, FIXED_WIDTH][0] for m in LAYERS], "o-", label=name)
        right.loglog(WIDTHS, [rows[FIXED_LAYERS, d][0] for d in WIDTHS], "s--", label=name)
    left.set(xlabel=f"layers of width {FIXED_WIDTH}", ylabel="temporary bytes")
    right.set(xlabel=f"width, {FIXED_LAYERS} layers")
    left.legend(frameon=False, fontsize=8)
