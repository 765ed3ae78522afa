"""The correlation of gradients at different inputs, by depth: a law for each architecture."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, exponent, verdict

WIDTH, ROWS, SEEDS, DEPTHS = 256, 32, 6, (1, 2, 4, 8, 16, 32)
# Whether a layer is a residual block, and whether it normalizes.
KINDS = {
    "plain": (False, False),
    "plain, batch norm": (False, True),
    "residual": (True, False),
    "residual, batch norm": (True, True),
}


def gradients(kind: str, key: jax.Array, depth: int) -> jax.Array:
    """Return the gradient of a random number of the output by each input, `[rows, width]`.

    The statistics of batch norm are held fixed, so each output depends on its own input alone.
    """
    path, norm = KINDS[kind]
    of_x, of_ct, of_layers = jax.random.split(key, 3)
    keys = jax.random.split(of_layers, depth)
    x = jax.random.normal(of_x, (ROWS, WIDTH))
    ct = jax.random.normal(of_ct, (WIDTH,))

    def layer(h: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        z = h
        if norm:
            mean, std = jax.lax.stop_gradient((h.mean(0), h.std(0) + 1e-6))
            z = (h - mean) / std
        y = jax.nn.relu(z) @ (jax.random.normal(key, (WIDTH, WIDTH)) * (2 / WIDTH) ** 0.5)
        return (h + y if path else y), None

    f = lambda x: jnp.sum(jax.lax.scan(layer, x, keys)[0] @ ct)
    return xform.grad(f)(x)


def correlation(kind: str, depth: int) -> float:
    """Return the mean cosine of the gradients at two inputs."""
    means = []
    run = jax.jit(gradients, static_argnums=(0, 2))
    for seed in range(SEEDS):
        g = np.asarray(run(kind, jax.random.key(seed), depth))
        g = g / np.linalg.norm(g, axis=1, keepdims=True)
        means.append((np.sum(g.sum(0) ** 2) - ROWS) / (ROWS * (ROWS - 1)))
    return float(np.mean(means))


def base(depths: Any, by: list[float]) -> float:
    """Return the factor for each layer of the exponential law that fits best."""
    usable = [(d, r) for d, r in zip(depths, by, strict=True) if r > 0.01]
    xs, ys = np.array(usable).T
    return float(np.exp(np.polyfit(xs, np.log(ys), 1)[0]))


def measure(quick: bool) -> Finding:
    """Measure random networks of one to 32 layers."""
    depths = DEPTHS[:4] if quick else DEPTHS
    found: dict[str, list[float]] = {k: [correlation(k, d) for d in depths] for k in KINDS}
    plain, normed = base(depths, found["plain"]), base(depths, found["plain, batch norm"])
    around = base(depths, found["residual"])
    power = exponent(depths, [max(r, 1e-3) for r in found["residual, batch norm"]])
    last = {k: rows[-1] for k, rows in found.items()}
    cured = last["residual, batch norm"] > 3 * max(last["plain, batch norm"], 0.01)
    return Finding(
        [
            Claim(
                "Gradients at different inputs lose their correlation by half with each layer;"
                " by a quarter with residual paths",
                "Balduzzi et al., The shattered gradients problem, arXiv:1702.08591, theorems 1, 2",
                "factors of 1/2 and 3/4 a layer, if a unit is active for half of the inputs,"
                " whatever it does for others",
                f"factors by layer, ReLU of width {WIDTH} after He: plain {plain:.2f}, plain with"
                f" batch norm {normed:.2f}, residual {around:.2f}",
                verdict(
                    abs(plain - 0.5) < 0.1 and abs(around - 0.75) < 0.1,
                    "holds if batch norm keeps units active for half of the inputs"
                    f" ({normed:.2f}); without it activations of different inputs become alike,"
                    f" and the factor is {plain:.2f}; wrong for residual paths: {around:.2f}"
                    if abs(normed - 0.5) < 0.1 < abs(around - 0.75)
                    else f"wrong: plain {plain:.2f}, residual {around:.2f}",
                ),
            ),
            Claim(
                "With batch norm and residual paths the correlation falls as 1 / √L only",
                "Balduzzi et al., arXiv:1702.08591, theorem 3",
                "a power law with exponent -0.5 in place of an exponential one",
                f"exponent {power:.2f}; correlation after {depths[-1]} layers: "
                + ", ".join(f"{k} {r:.3f}" for k, r in last.items()),
                verdict(
                    cured and abs(power + 0.5) < 0.15,
                    f"holds as a remedy; the exponent is {power:.2f}" if cured else "wrong",
                ),
            ),
        ],
        lambda figure: draw(figure, depths, found),
    )


def draw(figure: Figure, depths: Any, found: dict[str, list[float]]) -> None:
    """Draw the correlation by depth, and the laws."""
    axes = figure.subplots()
    for kind, rows in found.items():
        axes.loglog(depths, [max(r, 1e-3) for r in rows], "o-", label=kind)
    for law, text in ((0.5 ** np.array(depths), "1/2 a layer"),
                      (0.75 ** np.array(depths), "3/4 a layer"),
                      (np.array(depths) ** -0.5, "1 / √L")):  # fmt: skip
        axes.loglog(depths, np.maximum(law, 1e-3), "k:", linewidth=0.8)
        axes.annotate(text, (depths[-1], max(law[-1], 1e-3)), fontsize=7)
    axes.set(xlabel="layers", ylabel="mean cosine of gradients at two inputs", ylim=(8e-4, 1.5))
    axes.legend(frameon=False, fontsize=8)
