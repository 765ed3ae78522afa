"""What `xform.health` reports about faulty networks before and after each remedy.

The faults are vanishing, exploding, dead, saturated and shattered layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict
from xform.diagnosis.report import Report

WIDTH, DEPTH, ROWS, CLASSES = 128, 50, 64, 10
# Symptoms of units; the other symptoms are of gradients.
UNITS = ("dead", "saturated")


@dataclasses.dataclass(frozen=True)
class Network:
    """A perceptron: its variance of a weight times the fan-in, and what the remedies change."""

    activation: Callable[[jax.Array], jax.Array] = jax.nn.relu
    gain: float = 2.0
    bias: float = 0.0
    path: bool = False
    norm: bool = False
    depth: int = DEPTH

    def params(self) -> Any:
        """Return the weights of all layers, with the bias in the middle one, and of the last."""
        keys = jax.random.split(jax.random.key(0), self.depth + 1)
        draw = lambda k: jax.random.normal(k, (WIDTH, WIDTH)) * (self.gain / WIDTH) ** 0.5
        biases = jnp.zeros((self.depth, WIDTH)).at[self.depth // 2].set(self.bias)
        head = draw(keys[-1])[:, :CLASSES]
        return {"w": jax.vmap(draw)(keys[:-1]), "b": biases, "head": head}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Compute the cross-entropy."""

        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            z = h @ p[0] + p[1]
            if self.norm:
                z = (z - z.mean(-1, keepdims=True)) / z.std(-1, keepdims=True)
            y = self.activation(z)
            return (h + y * self.depth**-0.5 if self.path else y), None

        x, labels = batch
        h, _ = jax.lax.scan(layer, x, (params["w"], params["b"]))
        logits = h @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def health(self, update: Any = None) -> Report:
        """Return its health report."""
        x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
        batch = x, jnp.zeros(ROWS, int)
        return xform.health(self.loss, self.params(), batch, update=update, power_iterations=0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A symptom, its source, the network that has it, and a network for each remedy."""

    symptom: str
    source: str
    predicted: str
    network: Network
    remedies: dict[str, Network]


LECUN = Network(gain=1.0)
LARGE = Network(gain=4.5)
DEAD = Network(bias=-20.0)
FLAT = Network(jnp.tanh, gain=1e4, depth=10)
CHAOS = Network(jnp.tanh, gain=9.0, depth=20)
CASES = (
    Case(
        "vanishing",
        "Glorot and Bengio, 2010; He et al., arXiv:1502.01852",
        "ReLUs halve variances with 1/in: the root falls to 2^-25 over 50 layers",
        LECUN,
        {
            "2/in (He)": dataclasses.replace(LECUN, gain=2.0),
            "SELU": dataclasses.replace(LECUN, activation=jax.nn.selu),
            "normalization": dataclasses.replace(LECUN, norm=True),
            "residual paths": dataclasses.replace(LECUN, path=True),
        },
    ),
    Case(
        "exploding",
        "Pascanu et al., arXiv:1211.5063",
        "weights of 1.5 times He's size: the root grows to 1.5^50 = 6e8 over 50 layers",
        LARGE,
        {
            "2/in (He)": dataclasses.replace(LARGE, gain=2.0),
            "normalization": dataclasses.replace(LARGE, norm=True),
        },
    ),
    Case(
        "dead",
        "Maas et al., Rectifier nonlinearities, 2013",
        "below 0 a ReLU has no slope, a leaky one has",
        DEAD,
        {
            "leaky ReLU": dataclasses.replace(DEAD, activation=lambda z: jax.nn.leaky_relu(z, 0.2)),
            "a bias of 0": dataclasses.replace(DEAD, bias=0.0),
            "normalization": dataclasses.replace(DEAD, norm=True),
        },
    ),
    Case(
        "saturated",
        "Glorot and Bengio, 2010",
        "tanh is flat from 3 on",
        FLAT,
        {
            "1/in (LeCun)": dataclasses.replace(FLAT, gain=1.0),
            "normalization": dataclasses.replace(FLAT, norm=True),
        },
    ),
    Case(
        "shattered",
        "Balduzzi et al., arXiv:1702.08591",
        "gradients of neighbours become noise with depth; with paths around scaled blocks not",
        CHAOS,
        {
            "residual paths": dataclasses.replace(CHAOS, path=True),
            "1/in (LeCun)": dataclasses.replace(CHAOS, gain=1.0),
        },
    ),
)


def said(report: Report) -> str:
    """Return how many layers are at fault, and with which fault, as text."""
    found = [row.verdict for row in report.findings]
    kinds = dict.fromkeys(found)
    return ", ".join(f"{found.count(k)} {k}" for k in kinds) or "fine"


def claim(case: Case, before: Report, after: dict[str, Report]) -> Claim:
    """Return the row of a symptom."""
    has = case.symptom in {row.verdict for row in before.findings}
    cured = [name for name, report in after.items() if report.healthy]
    others = [name for name in after if name not in cured]
    if not has or not cured:
        of = "wrong: " + ("no layer has the symptom" if not has else "none helps")
    else:
        of = verdict(not others, f"holds for {', '.join(cured)}; not for {', '.join(others)}")
    subject = "units" if case.symptom in UNITS else "gradients"
    cures = " and ".join(", ".join(after).rsplit(", ", 1))
    return Claim(
        f"{case.symptom.capitalize()} {subject} are cured by {cures}",
        case.source,
        case.predicted,
        f"of {case.network.depth} layers {said(before)}; with "
        + "; with ".join(f"{name}: {said(report)}" for name, report in after.items()),
        of,
    )


def clipped() -> Claim:
    """Claim that clipping bounds the step if gradients explode, and changes no gradient."""
    plain, with_ = (LARGE.health(update) for update in (
        optax.sgd(0.1), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    ))  # fmt: skip
    far = [max(r.update_to_weight or 0.0 for r in report) for report in (plain, with_)]
    same = plain.rows[0].gradient == with_.rows[0].gradient
    return Claim(
        "Clipping keeps gradients that explode from throwing the weights away",
        "Pascanu et al., arXiv:1211.5063",
        "the step is bounded by the rate times the norm that is allowed: 0.1; the gradients stay",
        f"the furthest that a layer moves, of its weights: {far[0]:.1e} without, {far[1]:.1e} with"
        f" it; layers are {said(with_)} in both",
        verdict(far[0] > 1 > far[1] and same and said(plain) == said(with_), "wrong"),
    )


def measure(quick: bool) -> Finding:
    """Measure each network before and after."""
    cases = CASES[2:3] if quick else CASES
    found = [
        (case, case.network.health(), {n: of.health() for n, of in case.remedies.items()})
        for case in cases
    ]
    claims = [claim(*one) for one in found]
    return Finding([*claims, clipped()], lambda figure: draw(figure, found))


def draw(figure: Figure, found: list[tuple[Case, Report, dict[str, Report]]]) -> None:
    """Draw gradients by layer, before and after."""
    panels = np.atleast_1d(figure.subplots(1, len(found)))
    for axes, (case, before, after) in zip(panels, found, strict=True):
        for name, report in {"before": before, **after}.items():
            rows = [row.gradient for row in report if row.kind == "layer"]
            axes.plot(rows, "k" if name == "before" else "--", label=name)
        axes.set(title=case.symptom, xlabel="layer", yscale="log")
        axes.legend(frameon=False, fontsize=6, handlelength=1)
    panels[0].set_ylabel("gradient, root mean square")
