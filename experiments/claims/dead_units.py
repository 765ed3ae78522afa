"""Dead ReLUs over training, by learning rate; and Xavier's initialization with sigmoids."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict
from experiments.claims.depth import norms
from experiments.claims.programs import normal

ROWS, INPUTS, WIDTH, STEPS = 256, 16, 64, 300
RATES = (0.003, 0.01, 0.03, 0.06, 0.1)
DEEP = 20


def forward(params: Any, x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Return the inputs of the ReLUs of both layers, and the output."""
    first = x @ params["w1"] + params["b1"]
    second = jax.nn.relu(first) @ params["w2"] + params["b2"]
    return [first, second], jax.nn.relu(second) @ params["w3"]


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute the mean square error."""
    return jnp.mean((forward(params, x)[1] - y) ** 2)


def trained(rate: float, steps: int) -> tuple[np.ndarray, float, float]:
    """Train by gradient descent on one batch.

    Returns:
      Whether each unit is dead before each step, `[steps, layers, units]`; the largest gradient of
      a dead unit's own weights; and the last loss.
    """
    params = {"w1": normal(INPUTS, WIDTH), "b1": jnp.zeros(WIDTH),
              "w2": normal(WIDTH, WIDTH, seed=1) * 2**0.5, "b2": jnp.zeros(WIDTH),
              "w3": normal(WIDTH, 1, seed=2)}  # fmt: skip
    x = jnp.abs(normal(ROWS, INPUTS, seed=3)) * ROWS**0.5
    y = 3 * jnp.sin(x[:, :1]) * x[:, 1:2] - 3

    def step(params: Any, _: Any) -> Any:
        dead = jnp.stack([jnp.all(z <= 0, 0) for z in forward(params, x)[0]])
        g = xform.grad(loss)(params, x, y)
        layers = (("w1", "b1"), ("w2", "b2"))
        own = jnp.stack([jnp.abs(g[w]).max(0) + jnp.abs(g[b]) for w, b in layers])
        after = jax.tree.map(lambda p, g: p - rate * g, params, g)
        return after, (dead, jnp.max(jnp.where(dead, own, 0)))

    last, (dead, own) = jax.jit(lambda p: jax.lax.scan(step, p, None, steps))(params)
    return np.asarray(dead), float(jnp.max(own)), float(loss(last, x, y))


def measure(quick: bool) -> Finding:
    """Measure training at several rates, and deep networks of sigmoids."""
    rates, steps = (RATES[::2], 100) if quick else (RATES, STEPS)
    runs = {rate: trained(rate, steps) for rate in rates}
    found = {rate: run for rate, run in runs.items() if np.isfinite(run[2])}
    died = {r: float(dead[-1].mean()) for r, (dead, _, _) in found.items()}
    own = max(o for _, o, _ in found.values())
    # A unit that is dead before one step, and not before a later one.
    again = lambda layer: sum(
        int((np.maximum.accumulate(dead[:, layer]) & ~dead[:, layer]).any(0).sum())
        for dead, _, _ in found.values()
    )
    ever = lambda layer: sum(int(dead[:, layer].any(0).sum()) for dead, _, _ in found.values())
    back = [again(0), again(1)]
    least, most = died[rates[0]], max(died.values())
    with jax.enable_x64():
        sigmoid = norms(jax.nn.sigmoid, 1.0, DEEP)
        remedy = norms(jax.nn.sigmoid, 16.0, DEEP)
    factor, cured = 10 ** sigmoid[1], 10 ** remedy[1]
    return Finding(
        [
            Claim(
                "A dead unit stays dead",
                "Maas et al., Rectifier nonlinearities, 2013; lecture notes",
                "a ReLU that passes nothing for the whole batch gets no gradient: its weights stay."
                " In a second layer its inputs still move",
                f"the largest gradient of a dead unit is {own:.0e}; of {ever(0)} that died in the"
                f" first layer {back[0]} came back, of {ever(1)} in the second {back[1]}",
                verdict(
                    own == 0 and not any(back) and ever(0) + ever(1) > 0,
                    "holds in the first layer; in the second, units come back as their inputs move"
                    if own == 0 and not back[0] and ever(0)
                    else "wrong",
                ),
            ),
            Claim(
                "A lower learning rate keeps units from dying",
                "lecture notes; Lu et al., Dying ReLU and initialization, arXiv:1903.06733",
                "a large step moves a unit's bias below all of its inputs",
                f"dead after {steps} steps: "
                + ", ".join(f"{d:.0%} at {r}" for r, d in died.items()),
                verdict(
                    most > 2 * least + 0.02 and least < 0.05,
                    f"wrong: {least:.0%} at {rates[0]}, {most:.0%} at most",
                ),
            ),
            Claim(
                "Xavier's initialization keeps variances through layers of sigmoid",
                "Glorot and Bengio, 2010: it is derived for a slope of 1 at 0",
                "a sigmoid's slope is at most 1/4: the gradient falls to a quarter in each layer;"
                " four times the weights make up for that",
                f"gradient by layer, {DEEP} layers: {factor:.3f} with Xavier, {cured:.3f} with four"
                " times the weights",
                verdict(
                    0.8 < factor < 1.25,
                    f"wrong: the gradient falls to {factor:.2f} of itself in each layer; with four"
                    f" times the weights to {cured:.2f}",
                ),
            ),
        ],
        lambda figure: draw(figure, found),
    )


def draw(figure: Figure, found: Any) -> None:
    """Draw dead units over training, for each rate and layer."""
    for layer, axes in enumerate(figure.subplots(1, 2, sharey=True)):
        for rate, (dead, _, _) in found.items():
            axes.plot(100 * dead[:, layer].mean(1), label=f"rate {rate}")
        axes.set(xlabel="step", title=f"layer {layer + 1}")
    figure.axes[0].set_ylabel("dead units, %")
    figure.axes[0].legend(frameon=False, fontsize=7)
