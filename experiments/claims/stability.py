"""Whether forward accumulation by products of matrices loses more digits than reverse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.claims.claim import Claim, Finding, spread
from experiments.claims.programs import normal

WIDTH, SEEDS = 32, 20
DEPTHS = (10, 30, 100, 300, 1000)


def errors(depth: int, seed: int) -> tuple[float, float]:
    """Return the relative float32 errors of a chain's gradient: by products first, and backward."""
    keys = [normal(WIDTH, WIDTH, seed=seed * 10_000 + i) for i in range(depth)]
    matrices, ct = np.stack(keys), np.asarray(normal(WIDTH, seed=seed + 7))
    exact = ct.astype(np.float64)
    for matrix in matrices[::-1].astype(np.float64):
        exact = exact @ matrix
    ms, v = jnp.asarray(matrices), jnp.asarray(ct)
    product = jax.lax.scan(lambda p, m: (m @ p, None), jnp.eye(WIDTH), ms)[0]
    back = jax.lax.scan(lambda v, m: (v @ m, None), v, ms, reverse=True)[0]
    size = np.linalg.norm(exact)
    return tuple(float(np.linalg.norm(np.asarray(x, np.float64) - exact) / size)
                 for x in (v @ product, back))  # pyright: ignore[reportReturnType]  # fmt: skip


def measure(quick: bool) -> Finding:
    """Measure random chains of ten to a thousand layers, each for several seeds."""
    depths, seeds = (DEPTHS[:-1], 5) if quick else (DEPTHS, SEEDS)
    found = {d: np.array([errors(d, s) for s in range(seeds)]) for d in depths}
    ratios = {d: float(np.median(e[:, 0] / e[:, 1])) for d, e in found.items()}
    said = ", ".join(f"{ratio:.1f} at {d}" for d, ratio in ratios.items())
    if min(ratios.values()) > 1.05:
        verdict = f"holds, by a factor of {spread([*ratios.values()], 1)} at the median"
    elif max(ratios.values()) > 1.5:
        verdict = f"holds if there are {max(ratios, key=lambda d: ratios[d]):,} layers"
    else:
        verdict = "wrong: of random chains both lose as much"
    return Finding(
        [
            Claim(
                "Forward mode by naive products of Jacobians is less stable than reverse mode",
                "lecture notes on automatic differentiation",
                "both backward stable, product by product; no bound says that one is better",
                f"error in float32 of forward over reverse, median of {seeds} chains: {said}",
                verdict,
            )
        ],
        lambda figure: draw(figure, found),
    )


def draw(figure: Figure, found: dict[int, np.ndarray]) -> None:
    """Draw both errors by depth."""
    axes = figure.subplots()
    for i, (name, marker) in enumerate((("forward, by products", "o"), ("reverse", "s"))):
        middle = [np.median(e[:, i]) for e in found.values()]
        axes.loglog([*found], middle, f"{marker}-", label=name)
    axes.set(xlabel="layers", ylabel="relative error, float32, median")
    axes.legend(frameon=False)
