"""How activations and gradients grow or vanish with depth, by initialization and activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict

WIDTH, WIDE, ROWS = 128, 1024, 64
DEPTHS = (10, 100, 1000)
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda x: x,
    "tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "leaky ReLU": jax.nn.leaky_relu,
    "SELU": jax.nn.selu,
}
# Variance of a weight, times the width.
INITS = {"LeCun, 1/in": 1.0, "Xavier, 2/(in + out)": 1.0, "He, 2/in": 2.0}


def norms(activation: Any, gain: float, depth: int, width: int = WIDTH,
          residual: bool = False) -> tuple[float, float]:  # fmt: skip
    """Return how activations grow forward and gradients backward, in powers of ten per layer.

    The ratios are of root mean squares: the last activation over the first, and the gradient at the
    input over the gradient at the output. A residual branch ends in a product, so its mean is 0.
    """
    keys = jax.random.split(jax.random.key(0), depth)
    draw = lambda key, gain: jax.random.normal(key, (width, width)) * (gain / width) ** 0.5
    x = jax.random.normal(jax.random.key(1), (ROWS, width))
    ct = jax.random.normal(jax.random.key(2), (ROWS, width))

    def layer(h: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        y = activation(h @ draw(key, gain))
        if residual:
            y = h + y @ draw(jax.random.fold_in(key, 1), 1.0) / depth**0.5
        return y, None

    f = lambda x: jax.lax.scan(layer, x, keys)[0]
    last, back = jax.jit(lambda x, ct: _both(f, x, ct))(x, ct)
    root = lambda a: jnp.sqrt(jnp.mean(jnp.asarray(a, jnp.float64) ** 2))
    tiny = jnp.finfo(jnp.float64).tiny
    logs = [jnp.log10(root(a) / root(b) + tiny) for a, b in ((last, x), (back, ct))]
    return float(logs[0]) / depth, float(logs[1]) / depth


def _both(f: Any, x: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    last, pull = xform.vjp(f, x)
    return last, pull(ct)[0]


def measure(quick: bool) -> Finding:
    """Measure the slopes for each pair of activation and initialization, in float64."""
    depths = DEPTHS[:2] if quick else DEPTHS
    run: dict[tuple[str, str], dict[int, tuple[float, float]]] = {}
    with jax.enable_x64():
        for name, activation in ACTIVATIONS.items():
            for init, gain in INITS.items():
                run[name, init] = {d: norms(activation, gain, d) for d in depths}
        residual = {d: norms(jax.nn.relu, 2.0, d, residual=True) for d in depths}
        wide = {name: norms(ACTIVATIONS[name], gain, 100, width=WIDE)
                for name, gain in (("ReLU", 2.0), ("linear", 1.0))}  # fmt: skip
    deepest = depths[-1]
    slope = lambda name, init: run[name, init][deepest]
    # Half of a ReLU's inputs pass, so a gain of 1 halves variances: 10**(-0.15) for the root.
    half = np.log10(0.5) / 2
    he = {n: slope(n, "He, 2/in") for n in ACTIVATIONS}
    lecun = {n: slope(n, "LeCun, 1/in") for n in ACTIVATIONS}
    said = lambda pair: f"{10 ** pair[0]:.3f} forward, {10 ** pair[1]:.3f} backward"
    # Within a factor of ten over all layers together.
    kept = lambda pair, depth=deepest: all(abs(p) * depth < 1 for p in pair)
    # A layer of n columns loses about 1/n of the logarithm's mean, whatever its mean square does.
    near = f"; {WIDE} columns instead of {WIDTH}, 100 layers: "
    finite = f"holds if layers are wide: of {WIDTH} columns the typical size fades"
    matches = all(abs(p - half) < 0.01 for p in lecun["ReLU"])
    return Finding(
        [
            Claim(
                "He, 2/in, keeps variances through layers of ReLU; Xavier and LeCun do not",
                "He et al., arXiv:1502.01852, equations 10 and 14",
                f"a factor of 1 for each layer; {10**half:.3f} with 1/in",
                f"{deepest:,} layers: He {said(he['ReLU'])}; LeCun {said(lecun['ReLU'])}{near}"
                f"He {said(wide['ReLU'])}",
                verdict(
                    kept(he["ReLU"]) and matches,
                    finite if matches and kept(wide["ReLU"], 100) else "wrong",
                ),
            ),
            Claim(
                "LeCun, 1/in, keeps variances through linear layers, and so does Xavier where"
                " layers are square",
                "LeCun et al., Efficient BackProp, 1998; Glorot and Bengio, 2010, equation 12",
                "a factor of 1 for each layer",
                f"{deepest:,} layers: {said(lecun['linear'])}{near}{said(wide['linear'])}",
                verdict(kept(lecun["linear"]), finite if kept(wide["linear"], 100) else "wrong"),
            ),
            Claim(
                "Xavier keeps variances through layers of tanh",
                "Glorot and Bengio, 2010: it is derived near 0",
                "a factor of 1 while tanh is linear; below it, as activations shrink, a power law",
                f"{deepest:,} layers: {said(lecun['tanh'])}",
                verdict(
                    kept(lecun["tanh"]),
                    "holds near 0 only: activations shrink until it is so"
                    if lecun["tanh"][0] > -0.01
                    else "wrong",
                ),
            ),
            Claim(
                "SELU with LeCun's initialization keeps activations at any depth",
                "Klambauer et al., arXiv:1706.02515, theorem 1",
                "a fixed point at variance 1",
                f"{deepest:,} layers: {said(lecun['SELU'])}",
                verdict(abs(lecun["SELU"][0]) * deepest < 1, "wrong"),
            ),
            Claim(
                "Residual paths keep gradients from vanishing: a product of (I + dF), 2^L paths",
                "Veit et al., arXiv:1605.06431; He et al., arXiv:1512.03385",
                "branches scaled by 1/√L: a factor of √e = 1.65, (1 + 1/L)^(L/2), in all",
                "over all layers together: "
                + ", ".join(
                    f"{10 ** (p[1] * d):.2f} backward at {d:,}" for d, p in residual.items()
                ),
                verdict(all(0.3 < 10 ** (p[1] * d) < 3.5 for d, p in residual.items()), "wrong"),
            ),
        ],
        lambda figure: draw(figure, run, residual),
    )


def draw(figure: Figure, run: Any, residual: Any) -> None:
    """Draw the size of the gradient at the input, by depth."""
    axes = figure.subplots()
    for (name, init), by in run.items():
        if (name, init) in SHOWN:
            axes.plot([*by], [d * pair[1] for d, pair in by.items()], "o-", label=f"{name}, {init}")
    axes.plot([*residual], [d * pair[1] for d, pair in residual.items()], "s--", label="residual")
    axes.set(xscale="log", xlabel="layers",
             ylabel="gradient at the input, power of ten")  # fmt: skip
    axes.set_yscale("symlog")
    axes.legend(frameon=False, fontsize=8)


SHOWN = {("ReLU", "He, 2/in"), ("ReLU", "LeCun, 1/in"), ("tanh", "Xavier, 2/(in + out)"),
         ("SELU", "LeCun, 1/in"), ("linear", "He, 2/in")}  # fmt: skip
