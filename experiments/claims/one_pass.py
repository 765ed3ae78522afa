"""One backward pass for all parameters against one pass for each parameter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, exponent, spread, verdict
from experiments.claims.programs import normal
from experiments.timing import paired
from xform.interpret.cost import program_flops

WIDTHS, LAYERS, ROWS = (4, 8, 16, 32), 2, 8
KEEP = xform.policies.save_everything


def loss(params: jax.Array, x: jax.Array) -> jax.Array:
    """Compute layers of tanh whose weights are one vector."""
    for w in params.reshape(LAYERS, x.shape[1], x.shape[1]):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def each(params: jax.Array, x: jax.Array) -> jax.Array:
    """Compute the derivative by each parameter in a forward pass of its own."""

    def pushed(i: jax.Array) -> jax.Array:
        direction = jax.nn.one_hot(i, params.size)
        return xform.jvp(lambda p: loss(p, x), (params,), (direction,))[1]

    return jax.lax.map(pushed, jnp.arange(params.size))


def differences(params: jax.Array, x: jax.Array) -> jax.Array:
    """Compute a difference quotient for each parameter."""
    h, base = 1e-2, loss(params, x)
    moved = lambda i: (loss(params.at[i].add(h), x) - base) / h
    return jax.lax.map(moved, jnp.arange(params.size))


WAYS: dict[str, Any] = {
    "one backward pass": xform.grad(loss, policy=KEEP),
    "a forward pass for each": each,
    "a difference for each": differences,
}


def measure(quick: bool) -> Finding:
    """Count FLOPs over those of the function, and measure times of the largest network."""
    widths = WIDTHS[:3] if quick else WIDTHS
    counts = [LAYERS * d * d for d in widths]
    passes: dict[str, list[float]] = {name: [] for name in WAYS}
    for d in widths:
        args = jax.eval_shape(lambda d=d: (normal(LAYERS * d * d), normal(ROWS, d)))
        base = program_flops(loss, *args)
        for name, way in WAYS.items():
            passes[name].append(program_flops(way, *args) / base)
    d = widths[-1]
    made = np.asarray(normal(LAYERS * d * d)) * d**-0.5, normal(ROWS, d)
    runs: dict[str, Any] = {n: jax.jit(way).lower(*made).compile() for n, way in WAYS.items()}
    exact = jax.grad(loss)(*made)
    off = {n: float(jnp.linalg.norm(run(*made) - exact) / jnp.linalg.norm(exact))
           for n, run in runs.items()}  # fmt: skip
    one, *others = WAYS
    slower = {n: paired(runs[n], runs[one], made, n=5 if quick else 9)[0] for n in others}
    grows = {n: exponent(counts, by) for n, by in passes.items()}
    return Finding(
        [
            Claim(
                "One backward pass gives the derivatives by all parameters; otherwise it takes a"
                " pass for each parameter",
                "Rumelhart, Hinton, Williams, 1986; Griewank, Who invented the reverse mode, 2012",
                "evaluations of the function: at most 5 at any number of parameters P; 2 P to 3 P"
                " by forward passes, P + 1 by differences",
                f"{counts[0]:,} to {counts[-1]:,} parameters, FLOPs over the function's: "
                + "; ".join(f"{n} {spread(by, 1)} (as P^{grows[n]:.2f})"
                            for n, by in passes.items())
                + f"; time over the backward pass at {counts[-1]:,}: "
                + ", ".join(f"{n} {t:,.0f}" for n, t in slower.items())
                + f"; relative error of differences {off[others[1]]:.0e}",
                verdict(
                    max(passes[one]) <= 5
                    and abs(grows[one]) < 0.1
                    and all(abs(grows[n] - 1) < 0.15 for n in others)
                    and max(off[one], off[others[0]]) < 1e-4,
                    "wrong",
                ),
            )
        ],
        lambda figure: draw(figure, counts, passes),
    )  # fmt: skip


def draw(figure: Figure, counts: list[int], passes: dict[str, list[float]]) -> None:
    """Draw the evaluations by number of parameters."""
    axes = figure.subplots()
    for name, by in passes.items():
        axes.loglog(counts, by, "o-", label=name)
    axes.set(xlabel="parameters", ylabel="FLOPs / those of the function")
    axes.legend(frameon=False)
