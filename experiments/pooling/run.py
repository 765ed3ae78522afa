"""The cost of pooling in a backward pass: bytes and time, relative to `jax.grad`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import linen as nn
from jax import lax

import xform
from experiments.report import write_table
from experiments.timing import paired

HERE = Path(__file__).parent
MIB = 2**20
HEAD = [
    "program",
    "jax.grad, MiB",
    "xform.grad, MiB",
    "predicted",
    "ratio",
    "time ratio",
    "quartiles",
]
# Windows, strides, padding.
WINDOWS = {
    "2 x 2, strides of 2": (2, 2, "VALID"),
    "3 x 3, strides of 2": (3, 2, "SAME"),
    "3 x 3, strides of 1": (3, 1, "SAME"),
    "5 x 5, strides of 2": (5, 2, "SAME"),
    "7 x 7, strides of 1": (7, 1, "SAME"),
}
ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu, "tanh": jnp.tanh}
POOLS = {"max": nn.max_pool, "mean": nn.avg_pool}


def pooled(size: int, stride: int, padding: str) -> Callable[[Any], Any]:
    """Return the sum of squared maxima of windows of images, as a function."""

    def loss(x: Any) -> Any:
        windows = (1, size, size, 1), (1, stride, stride, 1)
        return jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, *windows, padding) ** 2)

    return loss


def network(activation: Any, pool: Any) -> Callable[[Any, Any], Any]:
    """Return three convolutions, each with an activation and pooling by two and two."""

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            dims = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
            x = pool(activation(x), window_shape=(2, 2), strides=(2, 2))
        return jnp.mean(x**2)

    return loss


def programs() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield names, losses and arguments."""
    rng = np.random.default_rng(0)
    image = jnp.asarray(rng.normal(size=(16, 64, 64, 32)), "float32")
    for name, window in WINDOWS.items():
        yield f"maxima, {name}", pooled(*window), (image,)
    sizes = ((3, 32), (32, 64), (64, 128))
    ws = [jnp.asarray(rng.normal(size=(3, 3, *size)), "float32") / 10 for size in sizes]
    x = jnp.asarray(rng.normal(size=(64, 64, 64, 3)), "float32")
    for name, activation in ACTIVATIONS.items():
        for way, pool in POOLS.items():
            yield f"CNN, {name}, {way}", network(activation, pool), (ws, x)


def measured(name: str, loss: Any, args: tuple[Any, ...], times: int) -> tuple[list[str], float]:
    """Return a row, and the ratio of bytes."""
    theirs, ours = (jax.jit(grad(loss)).lower(*args).compile() for grad in (jax.grad, xform.grad))
    for a, b in zip(jax.tree.leaves(ours(*args)), jax.tree.leaves(theirs(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(jnp.abs(b).max()))
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (theirs, ours)]
    plan = xform.plan(loss, *args)
    off = plan.predicted_bytes / plan.compiled_bytes - 1
    middle, low, high = paired(ours, theirs, args, times)
    row = [name, f"{sizes[0] / MIB:.0f}", f"{sizes[1] / MIB:.0f}", f"{off:+.1%}",
           f"{sizes[1] / sizes[0]:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]  # fmt: skip
    return row, sizes[1] / sizes[0]


def draw(ratios: dict[str, float]) -> None:
    """Draw the bytes of each program, relative to `jax.grad`'s."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    axes.barh([*ratios], [*ratios.values()], color="#3b6ea5")
    axes.axvline(1, color="#444444", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("temporary bytes of xform.grad, as a part of jax.grad's (line: equal)")
    figure.savefig(HERE / "bytes.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=9, help="pairs of runs")
    times = parser.parse_args().times
    rows: list[list[str]] = []
    ratios: dict[str, float] = {}
    for name, loss, args in programs():
        row, ratios[name] = measured(name, loss, args, times)
        rows.append(row)
        print(row, flush=True)
    write_table(HERE, HEAD, rows)
    draw(ratios)


if __name__ == "__main__":
    main()
