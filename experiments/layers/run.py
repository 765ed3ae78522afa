"""The default's bytes in stacks of Flax's own layers and activations, relative to `jax.grad`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import linen as nn

import xform
from experiments.report import write_table

HERE = Path(__file__).parent
MIB = 2**20
HEAD = ["three layers of", "jax.grad, MiB", "default", "ratio", "save_nothing", "ratio"]
IMAGES, LINES = (32, 32, 32, 16), (32, 64, 64)
Layer = Callable[[], Callable[[Any], Any]]


def conv(features: int = 16, **options: Any) -> nn.Conv:
    return nn.Conv(features, (3, 3), **options)


def then(*layers: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return nn.Sequential(layers)


def windows(pool: Any, size: int) -> Callable[[Any], Any]:
    return lambda x: pool(x, (size, size), (2, 2), "SAME")


def excited(x: Any) -> Any:
    """Scale the features of a convolution by the output of a small network on their means."""
    y = conv()(x)
    scale = nn.sigmoid(nn.Dense(16)(nn.gelu(nn.Dense(4)(y.mean((1, 2))))))
    return y * scale[:, None, None]


LAYERS: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "Conv": (conv, IMAGES),
    "Conv, strides": (lambda: conv(32, strides=2), IMAGES),
    "Conv, depthwise": (lambda: conv(feature_group_count=16), IMAGES),
    "ConvTranspose": (lambda: nn.ConvTranspose(16, (2, 2), (2, 2)), (32, 8, 8, 16)),
    "ConvLocal": (lambda: nn.ConvLocal(16, (3, 3)), (32, 8, 8, 16)),
    "Conv, LayerNorm": (lambda: then(conv(), nn.LayerNorm()), IMAGES),
    "Conv, GroupNorm": (lambda: then(conv(), nn.GroupNorm(4)), IMAGES),
    "Conv, max_pool of 2": (lambda: then(conv(), windows(nn.max_pool, 2)), IMAGES),
    "Conv, max_pool of 3": (lambda: then(conv(), windows(nn.max_pool, 3)), IMAGES),
    "Conv, gelu, max_pool": (lambda: then(conv(), nn.gelu, windows(nn.max_pool, 2)), IMAGES),
    "Conv, avg_pool": (lambda: then(conv(), windows(nn.avg_pool, 2)), IMAGES),
    "Conv, squeeze and excite": (lambda: excited, IMAGES),
    "Dense": (lambda: nn.Dense(64), LINES),
    "Dense, RMSNorm": (lambda: then(nn.Dense(64), nn.RMSNorm()), LINES),
    "WeightNorm": (lambda: nn.WeightNorm(nn.Dense(64)), LINES),
    "Dense, gelu, Dense": (lambda: then(nn.Dense(256), nn.gelu, nn.Dense(64)), LINES),
    "MultiHeadDotProductAttention": (lambda: nn.MultiHeadDotProductAttention(4), LINES),
    "LSTM": (lambda: nn.RNN(nn.LSTMCell(64)), LINES),
    "GRU": (lambda: nn.RNN(nn.GRUCell(64)), LINES),
}
ACTIVATIONS = ("gelu", "silu", "elu", "celu", "selu", "softplus", "leaky_relu", "hard_swish",
               "log_sigmoid", "soft_sign", "relu6", "tanh")  # fmt: skip


class Stack(nn.Module):
    """Three layers, each with an activation, and the mean of squares."""

    layer: Layer
    activation: Callable[[Any], Any] = nn.relu

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(3):
            x = self.activation(self.layer()(x))
        return jnp.mean(x**2)


def stacks() -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    for name, (layer, shape) in LAYERS.items():
        yield f"{name}, relu", Stack(layer), shape
    for name in ACTIVATIONS:
        for layer in ("Conv", "Dense"):
            make, shape = LAYERS[layer]
            yield f"{layer}, {name}", Stack(make, getattr(nn, name)), shape


def measured(model: nn.Module, shape: tuple[int, ...]) -> list[int]:
    """Return temporary bytes by jax.grad, default and save_nothing; gradients must agree."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), "float32")
    params = model.init(jax.random.key(0), x)
    loss = lambda params, x: model.apply(params, x)
    ways = [jax.grad(loss), xform.grad(loss),
            xform.grad(loss, policy=xform.policies.save_nothing)]  # fmt: skip
    compiled = [jax.jit(way).lower(params, x).compile() for way in ways]
    theirs, *ours = (jax.tree.leaves(c(params, x)) for c in compiled)
    largest = max(float(jnp.abs(a).max()) for a in theirs)
    for gradient in ours:
        for a, b in zip(theirs, gradient, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * largest)
    return [c.memory_analysis().temp_size_in_bytes for c in compiled]


def draw(ratios: dict[str, float]) -> None:
    """Draw the default's bytes in each stack, relative to `jax.grad`'s."""
    figure, axes = plt.subplots(figsize=(8, 9), layout="constrained")
    colours = ["#b5543a" if ratio > 1 else "#3b6ea5" for ratio in ratios.values()]
    axes.barh([*ratios], [*ratios.values()], color=colours)
    axes.axvline(1, color="#444444", linewidth=1)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel("temporary bytes of the default, as a part of jax.grad's (line: equal)")
    figure.savefig(HERE / "bytes.png", dpi=110)


def main() -> None:
    rows: list[list[str]] = []
    ratios: dict[str, float] = {}
    for name, model, shape in stacks():
        theirs, default, nothing = measured(model, shape)
        ratios[name] = default / theirs
        rows.append([name, f"{theirs / MIB:.1f}", f"{default / MIB:.1f}", f"{default / theirs:.2f}",
                     f"{nothing / MIB:.1f}", f"{nothing / theirs:.2f}"])  # fmt: skip
        print(rows[-1], flush=True)
    values = sorted(ratios.values())
    more = sum(value > 1.005 for value in values)
    rows.append([f"median of {len(values)}", "", "", f"{values[len(values) // 2]:.2f}", "",
                 f"{more} above 1"])  # fmt: skip
    write_table(HERE, HEAD, rows)
    draw(ratios)


if __name__ == "__main__":
    main()
