"""The memory of training relative to inference, in compiled bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, spread
from experiments.claims.programs import PROGRAMS, Made, mlp, total_bytes, types
from experiments.planner.zoo import lstm

MODELS: dict[str, Callable[..., Made]] = {
    "MLP": lambda batch: mlp(512, 8, batch),
    "CNN": lambda batch: PROGRAMS["CNN"](batch=batch),
    "CNN, 12 layers": lambda batch: PROGRAMS["CNN"](depth=12, batch=batch),
    "transformer": lambda batch: PROGRAMS["transformer"](depth=6, batch=batch),
    "LSTM": lambda batch: lstm(steps=100, batch=batch),
}
BATCHES = (1, 4, 16, 64)
ADAM = optax.adam(1e-3)


def step(loss: Any, gradient: Any) -> Any:
    """Return a training step with Adam."""

    def train(w: Any, state: Any, x: Any) -> Any:
        updates, state = ADAM.update(gradient(loss)(w, x), state)
        return optax.apply_updates(w, updates), state

    return train


def measure(quick: bool) -> Finding:
    """Measure the bytes of a step relative to the loss alone, for batches of four sizes."""
    batches = BATCHES[1::2] if quick else BATCHES
    found: dict[tuple[str, str], list[float]] = {}
    for name, make in MODELS.items():
        for batch in batches:
            loss, args = make(batch=batch)
            w, x = types(args)
            state = jax.eval_shape(ADAM.init, w)
            alone = total_bytes(jax.jit(loss).lower(w, x).compile())
            for by, gradient in (("jax.grad", jax.grad), ("xform.grad", xform.grad)):
                run = jax.jit(step(loss, gradient), donate_argnums=(0, 1))
                whole = total_bytes(run.lower(w, state, x).compile())
                found.setdefault((name, by), []).append(whole / alone)
    theirs = [r for (_, by), ratios in found.items() if by == "jax.grad" for r in ratios]
    ours = [r for (_, by), ratios in found.items() if by == "xform.grad" for r in ratios]
    inside = [n for n in MODELS if all(3 <= r <= 4 for r in found[n, "jax.grad"])]
    if len(inside) == len(MODELS):
        verdict = "holds"
    else:
        share = sum(3 <= r <= 4 for r in theirs)
        verdict = f"holds for {share} of {len(theirs)} models and batches, with `jax.grad`"
    return Finding(
        [
            Claim(
                "Training takes three to four times the memory of inference",
                "rule of thumb of practitioners",
                "parameters, gradients and two moments of Adam are 4 times the parameters;"
                " activations come on top, and grow with batch and depth",
                f"a step with Adam over the loss alone: {spread(theirs, 1)} by jax.grad,"
                f" {spread(ours, 1)} by xform.grad",
                verdict,
            )
        ],
        lambda figure: draw(figure, found, batches),
    )


def draw(figure: Figure, found: dict[tuple[str, str], list[float]], batches: Any) -> None:
    """Draw ratios by batch: JAX's as solid lines, xform's dashed."""
    axes = figure.subplots()
    colors = {name: f"C{i}" for i, name in enumerate(MODELS)}
    for (name, by), ratios in found.items():
        style = "o-" if by == "jax.grad" else "s--"
        axes.plot(batches, ratios, style, color=colors[name], label=f"{name}, {by}", markersize=4)
    axes.axhspan(3, 4, color="gray", alpha=0.2)
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="bytes, training / inference")
    axes.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
