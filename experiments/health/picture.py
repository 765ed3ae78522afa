"""Draw the report in README.md: a perceptron of 16 layers with a fault in one.

python -m experiments.health.picture
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import xform

HERE = Path(__file__).parent
WIDTH, DEPTH, AT = 64, 16, 9


def loss(layers: Any, batch: Any) -> Any:
    """Compute the cross-entropy of a plain perceptron of ReLUs."""
    h, labels = batch
    for layer in layers[:-1]:
        h = jax.nn.relu(h @ layer["w"] + layer["b"])
    logits = h @ layers[-1]["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main() -> None:
    """Draw the report, write its page, and print its table."""
    keys = jax.random.split(jax.random.key(0), DEPTH + 2)
    draw = lambda key: jax.random.normal(key, (WIDTH, WIDTH)) * (2 / WIDTH) ** 0.5
    layers = [{"w": draw(key), "b": jnp.zeros(WIDTH)} for key in keys[:DEPTH]]
    layers[AT]["w"] = layers[AT]["w"] / 40
    batch = jax.random.normal(keys[-1], (64, WIDTH)), jnp.arange(64) % WIDTH
    report = xform.health(loss, layers, batch, update=optax.sgd(0.1))
    print(report)
    report.plot(HERE / "health.png")


if __name__ == "__main__":
    main()
