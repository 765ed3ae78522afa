"""The gradients of an inner loop, stacked before they are added, or added in place.

python -m experiments.inner_sums.run
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax

import xform
from experiments.report import write_table
from experiments.timing import paired
from xform.memory.report import MemoryReport
from xform.steering.settings import Steering

HERE = Path(__file__).parent
MIB = 2**20
GPU = "gpu:h100"
WAYS = ("jax.grad", "stacked", "in place")
HEAD = [
    "program", "weights, MiB",
    *(f"{target}: {way}, MiB" for target in ("CPU", "H100") for way in WAYS),
    "step on a CPU, in place / stacked", "in place / jax.grad",
]  # fmt: skip
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def numbers(*shape: int) -> Any:
    """Return random numbers, small enough for many layers."""
    return jnp.asarray(np.random.default_rng(0).normal(size=shape) / 16, jnp.float32)


def recurrent(layers: int, width: int, batch: int, steps: int) -> Program:
    """Return a recurrent network: a loop over steps, and in each step one over layers."""

    def loss(ws: Any, xs: Any) -> Any:
        def layer(x: Any, given: Any) -> Any:
            w, h = given
            h = jnp.tanh(x @ w["x"] + h @ w["h"])
            return h, h

        def step(h: Any, x: Any) -> Any:
            y, h = lax.scan(layer, x, (ws, h))
            return h, jnp.mean(y**2)

        return jnp.mean(lax.scan(step, jnp.zeros((layers, batch, width)), xs)[1])

    ws = {name: numbers(layers, width, width) for name in ("x", "h")}
    return loss, (ws, numbers(steps, batch, width))


def over_microbatches(layer: Callable[..., Any], ws: Any, xs: Any) -> Any:
    """Return the mean over microbatches of the mean square of the output of scanned layers."""
    one = lambda total, x: (total + jnp.mean(lax.scan(layer, x, ws)[0] ** 2), None)
    return lax.scan(one, 0.0, xs)[0] / len(xs)


def perceptron(layers: int, width: int, batch: int, parts: int) -> Program:
    """Return the mean loss of a residual perceptron over microbatches."""

    layer = lambda h, w: (h + jax.nn.gelu(h @ w["up"]) @ w["down"], None)
    ws = {"up": numbers(layers, width, 4 * width), "down": numbers(layers, 4 * width, width)}
    return functools.partial(over_microbatches, layer), (ws, numbers(parts, batch, width))


def attention(layers: int, width: int, tokens: int, parts: int) -> Program:
    """Return the mean loss of attention layers over microbatches of one sequence."""

    def layer(h: Any, w: Any) -> Any:
        q, k, v = jnp.split((h @ w["qkv"]).reshape(1, tokens, -1, 64), 3, -2)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return h + y.reshape(tokens, width) @ w["out"], None

    ws = {"qkv": numbers(layers, width, 3 * width), "out": numbers(layers, width, width)}
    return functools.partial(over_microbatches, layer), (ws, numbers(parts, tokens, width))


PROGRAMS: dict[str, Program] = {
    "recurrent, 8 layers of 256, batch 8": recurrent(8, 256, 8, 32),
    "recurrent, 12 layers of 512, batch 32": recurrent(12, 512, 32, 16),
    "perceptron, 12 layers, 8 x 64 rows": perceptron(12, 256, 64, 8),
    "attention, 8 layers, 4 x 256 tokens": attention(8, 512, 256, 4),
}


def stacked(loss: Callable[..., Any]) -> Any:
    """Return xform's gradient whose inner loops stack their gradients."""

    def gradient(*args: Any) -> Any:
        with Steering(sums_in_loops=False).used():
            return xform.grad(loss)(*args)

    return jax.jit(gradient)


def reports(ways: list[Any], args: Any, target: str | None) -> list[MemoryReport]:
    """Return the memory of the gradients on a target."""
    return [xform.memory_analysis(f, *args, target=target) for f in ways]


def main() -> None:
    rows: list[list[str]] = []
    shares: dict[str, list[float]] = {}
    for name, (loss, args) in PROGRAMS.items():
        ways = [jax.jit(jax.grad(loss)), stacked(loss), jax.jit(xform.grad(loss))]
        sizes = [r.temp_bytes / MIB for target in (None, GPU) for r in reports(ways, args, target)]
        runs = [f.lower(*args).compile() for f in ways]
        jax.tree.map(np.testing.assert_array_equal, runs[1](*args), runs[2](*args))
        ratios = [paired(runs[2], other, args)[0] for other in (runs[1], runs[0])]
        weights = sum(w.nbytes for w in jax.tree.leaves(args[0])) / MIB
        rows.append([name, f"{weights:.0f}", *(f"{n:.1f}" for n in sizes),
                     *(f"{r:.2f}" for r in ratios)])  # fmt: skip
        shares[name] = [n / sizes[3 * (i // 3)] for i, n in enumerate(sizes)]
        print(rows[-1], flush=True)
    write_table(HERE, HEAD, rows)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    places = np.arange(len(shares))
    for ax, first, target in zip(axes, (0, 3), ("CPU", "H100"), strict=True):
        for i, way in enumerate(WAYS):
            ax.barh(places + 0.27 * (i - 1), [s[first + i] for s in shares.values()], 0.25,
                    label=way)  # fmt: skip
        ax.set_yticks(places, [*shares])
        ax.set_xlabel(f"temporary memory / jax.grad's, {target}")
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
    figure.savefig(HERE / "bytes.png", dpi=120)


if __name__ == "__main__":
    main()
