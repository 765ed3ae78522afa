"""Checkpoints at every k-th layer: how memory and work depend on k, and which k is best."""

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

ROWS, WIDTH = 1024, 64
DEPTHS = (4, 16, 64, 256)
KEEP = xform.policies.save_everything


def loss(k: int) -> Any:
    """Return a loss of layers (product, tanh, sine); each `k` layers are a remat region."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sin(jnp.tanh(h @ w)), None

    def some(h: jax.Array, ws: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.scan(layer, h, ws)

    inner = xform.remat(some, policy=xform.policies.save_nothing) if k else some

    def f(ws: jax.Array, x: jax.Array) -> jax.Array:
        grouped = ws.reshape(-1, k or len(ws), WIDTH, WIDTH)
        return jnp.sum(jax.lax.scan(inner, x, grouped)[0])

    return f


def inputs(depth: int) -> tuple[jax.Array, jax.Array]:
    """Return weights and a batch."""
    return jnp.stack([normal(WIDTH, WIDTH, seed=i) for i in range(depth)]), normal(ROWS, WIDTH)


def compiled(k: int, args: Any) -> Any:
    """Compile the gradient: regions are recomputed, everything else is saved."""
    return jax.jit(xform.grad(loss(k), policy=KEEP)).lower(*args).compile()


def temp(run: Any) -> int:
    """Return the temporary bytes."""
    return run.memory_analysis().temp_size_in_bytes


def measure(quick: bool) -> Finding:
    """Measure bytes for each k that divides the depth, and time at the best k and without remat."""
    found: dict[int, dict[int, int]] = {}
    for depth in DEPTHS[:3] if quick else DEPTHS:
        args = jax.eval_shape(lambda depth=depth: inputs(depth))
        steps = [2**i for i in range(depth.bit_length())]
        found[depth] = {k: temp(compiled(k, args)) for k in steps}
    depth = max(found)
    args = inputs(depth)
    rest = temp(compiled(0, jax.eval_shape(lambda: args)))
    best = {d: min(by, key=lambda k: by[k]) for d, by in found.items()}
    law = fitted(found[depth], depth)
    each = ROWS * WIDTH * 4
    growth = exponent([*found], [by[best[d]] for d, by in found.items()])
    one, all_saved = compiled(best[depth], args), compiled(0, args)
    time, low, high = paired(one, all_saved, args, n=5 if quick else 9)
    grad = lambda k: xform.grad(loss(k), policy=KEEP)
    work = program_flops(grad(best[depth]), *args) / program_flops(grad(0), *args)
    near = all(0.5 <= k / d**0.5 <= 2 for d, k in best.items())
    source = "Chen et al., Training deep nets with sublinear memory cost, arXiv:1604.06174"
    return Finding(
        [
            Claim(
                "Checkpoints at every k of L layers hold O(w L / k + w k); the best k is √L",
                source,
                "bytes = w (a L / k + b k): a state for each region, and one region's values; the"
                " best k is √(a L / b)",
                f"fitted at L = {depth}: a = {law[0] / each:.2f}, b = {law[1] / each:.2f} states,"
                f" within {law[2]:.0%}; best k of L: "
                + ", ".join(f"{k} of {d}" for d, k in best.items())
                + f"; the best bytes grow as L^{growth:.2f}, and are"
                f" {found[depth][best[depth]] / rest:.2f} of those without",
                verdict(
                    near and law[2] < 0.15,
                    "holds if k may be twice or half of √L"
                    if all(0.25 <= k / d**0.5 <= 4 for d, k in best.items())
                    else "wrong",
                ),
            ),
            Claim(
                "That costs one more forward pass: 1.33 times the work; another text: it doubles",
                source,
                "FLOPs 4 / 3 where a backward pass is two forward passes",
                f"FLOPs {work:.2f}, time {time:.2f} ({low:.2f} to {high:.2f})",
                "holds for 1.33, and is wrong for 2"
                if 1.25 <= work <= 1.4
                else f"wrong: {spread([work])}",
            ),
        ],
        lambda figure: draw(figure, found),
    )


def fitted(by: dict[int, int], depth: int) -> tuple[float, float, float]:
    """Fit `a L / k + b k + c` to the bytes; return a, b, and the largest relative error."""
    ks, ys = np.array([*by], float), np.array([*by.values()], float)
    matrix = np.stack([depth / ks, ks, np.ones_like(ks)], axis=1) / ys[:, None]
    (a, b, c), *_ = np.linalg.lstsq(matrix, np.ones_like(ks), rcond=None)
    return a, b, float(np.max(np.abs((a * depth / ks + b * ks + c) / ys - 1)))


def draw(figure: Figure, found: dict[int, dict[int, int]]) -> None:
    """Draw bytes by k, a line for each depth."""
    axes = figure.subplots()
    for i, (depth, by) in enumerate(found.items()):
        axes.loglog([*by], [n / 2**20 for n in by.values()], "o-", color=f"C{i}",
                    label=f"{depth} layers")  # fmt: skip
        axes.axvline(depth**0.5, color=f"C{i}", linewidth=0.6, linestyle=":")
    axes.set(xlabel="layers of a region, k (dotted: the root of the depth)",
             ylabel="temporary MiB")  # fmt: skip
    axes.legend(frameon=False)
