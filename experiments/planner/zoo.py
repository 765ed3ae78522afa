"""Models of many kinds, small enough to compile in seconds and large enough for bytes to count.

Each is `make() -> (loss, (parameters, batch))`, in plain JAX with no remat of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.bench_step.run import transformer as decoder

Loss = Callable[[Any, Any], jax.Array]
Made = tuple[Loss, tuple[Any, Any]]


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Random numbers of a size that keeps activations near 1."""
    fan = shape[-2] if len(shape) == 2 else shape[0] * shape[1] * shape[2] if len(shape) == 4 else 1
    return jax.random.normal(jax.random.key(seed), shape) * fan**-0.5


def mlp() -> Made:
    """Sixteen residual layers of width 512 on 1024 rows."""
    ws = [(normal(512, 512, seed=i), normal(512, 512, seed=i + 99)) for i in range(16)]

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for a, b in ws:
            x = x + jax.nn.gelu(x @ a) @ b
        return jnp.mean(x**2)

    return loss, (ws, normal(1024, 512))


def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution of images, channels last."""
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def normed(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Each channel of each image, centered and scaled."""
    centered = x - x.mean((1, 2), keepdims=True)
    return centered * lax.rsqrt(jnp.mean(centered**2, (1, 2), keepdims=True) + 1e-5) * gain


def cnn() -> Made:
    """A residual network: three stages of three blocks, 32 to 128 channels."""
    stages = [
        [
            {
                "a": normal(3, 3, c if j or c == 32 else c // 2, c, seed=j),
                "b": normal(3, 3, c, c, seed=j + 50),
                "g": jnp.ones(c),
            }
            for j in range(3)
        ]
        for c in (32, 64, 128)
    ]
    params = {"stem": normal(3, 3, 3, 32), "stages": stages}

    def loss(p: Any, x: jax.Array) -> jax.Array:
        x = conv(x, p["stem"])
        for i, stage in enumerate(p["stages"]):
            for j, w in enumerate(stage):
                stride = 2 if i and not j else 1
                y = jax.nn.relu(normed(conv(x, w["a"], stride), w["g"]))
                y = normed(conv(y, w["b"]), w["g"])
                if stride == 2:
                    x = jnp.concatenate([x[:, ::2, ::2], jnp.zeros_like(x[:, ::2, ::2])], -1)
                x = jax.nn.relu(x + y)
        return jnp.mean(x.mean((1, 2)) ** 2)

    return loss, (params, jax.random.normal(jax.random.key(1), (8, 32, 32, 3)))


def unet() -> Made:
    """Three levels down and up, each with a skip."""
    widths = (16, 32, 64)
    down = [
        (normal(3, 3, a, b, seed=b), normal(3, 3, b, b, seed=b + 1))
        for a, b in zip((3, *widths), widths, strict=False)
    ]
    up = [
        (normal(3, 3, 3 * a, a, seed=a + 2), normal(3, 3, a, a, seed=a + 3)) for a in widths[-2::-1]
    ]

    def loss(p: Any, x: jax.Array) -> jax.Array:
        skips = []
        for i, (a, b) in enumerate(p["down"]):
            x = x[:, ::2, ::2] if i else x
            x = jax.nn.silu(conv(jax.nn.silu(conv(x, a)), b))
            skips.append(x)
        for (a, b), skip in zip(p["up"], skips[-2::-1], strict=True):
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = jax.nn.silu(conv(jax.nn.silu(conv(jnp.concatenate([x, skip], -1), a)), b))
        return jnp.mean(x**2)

    return loss, ({"down": down, "up": up}, jax.random.normal(jax.random.key(1), (8, 64, 64, 3)))


def mixture() -> Made:
    """Six layers of eight experts, of which each row takes two."""
    experts, width = 8, 128
    layers = [
        {
            "gate": normal(width, experts, seed=i),
            "up": jnp.stack([normal(width, 4 * width, seed=i * 31 + j) for j in range(experts)]),
            "down": jnp.stack([normal(4 * width, width, seed=i * 37 + j) for j in range(experts)]),
        }
        for i in range(6)
    ]

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        for p in layers:
            weight, index = lax.top_k(jax.nn.softmax(x @ p["gate"]), 2)
            chosen = jnp.sum(jax.nn.one_hot(index, experts) * weight[..., None], 1)
            h = jax.nn.gelu(jnp.einsum("td,edf->etf", x, p["up"]))
            x = x + jnp.einsum("etf,efd,te->td", h, p["down"], chosen)
        return jnp.mean(x**2)

    return loss, (layers, normal(256, width))


def lstm(steps: int = 1000, width: int = 128, batch: int = 32) -> Made:
    """A long short-term memory through time."""
    params = {
        "x": normal(64, 4 * width),
        "h": normal(width, 4 * width, seed=1),
        "b": jnp.zeros(4 * width),
    }

    def loss(p: Any, xs: jax.Array) -> jax.Array:
        def step(state: Any, x: jax.Array) -> Any:
            h, c = state
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zero = jnp.zeros((xs.shape[1], width))
        (h, _), _ = lax.scan(step, (zero, zero), xs)
        return jnp.mean(h**2)

    return loss, (params, jax.random.normal(jax.random.key(2), (steps, batch, 64)))


def ode() -> Made:
    """A neural differential equation: 200 steps of Runge and Kutta's fourth order."""
    params = [normal(64, 256), normal(256, 64, seed=1)]

    def loss(p: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        f = lambda x: jnp.tanh(x @ p[0]) @ p[1]

        def step(x: jax.Array, _: Any) -> Any:
            k1 = f(x)
            k2 = f(x + 0.005 * k1)
            k3 = f(x + 0.005 * k2)
            k4 = f(x + 0.01 * k3)
            return x + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        return jnp.mean(lax.scan(step, x, None, length=200)[0] ** 2)

    return loss, (params, normal(256, 64))


def transformer(scan: bool) -> Made:
    """The decoder of `models/`: six layers."""
    return decoder(scan, None)


ZOO: dict[str, Callable[[], Made]] = {
    "MLP": mlp,
    "CNN": cnn,
    "U-Net": unet,
    "transformer, scanned": lambda: transformer(True),
    "transformer, unrolled": lambda: transformer(False),
    "mixture of experts": mixture,
    "LSTM, 1000 steps": lstm,
    "neural ODE, 200 steps": ode,
}
