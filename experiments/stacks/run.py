"""The copies of stacks between the two loops of a derivative on a GPU.

python -m experiments.stacks.run
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
from xform.memory.report import MemoryReport
from xform.steering.settings import Steering

HERE = Path(__file__).parent
TARGET = "gpu:h100"
MIB = 2**20
LAYERS = 8
HEAD = [
    "program", "jax.grad, MiB", "shared layouts, MiB", "xform.grad, MiB",
    "shared layouts, MiB moved", "xform.grad, MiB moved",
]  # fmt: skip
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def types(dtype: Any, **shapes: tuple[int, ...]) -> dict[str, Any]:
    """Return the types of stacked parameters."""
    return {n: jax.ShapeDtypeStruct((LAYERS, *shape), dtype) for n, shape in shapes.items()}


def scanned(layer: Callable[..., Any], params: Any, *x: int, dtype: Any = jnp.bfloat16) -> Program:
    """Return the mean square of the output of scanned layers, and its arguments."""

    def loss(params: Any, x: Any) -> Any:
        cast = jax.tree.map(lambda a: a.astype(dtype), params)
        return jnp.mean(lax.scan(layer, x, cast)[0].astype(jnp.float32) ** 2)

    return loss, (params, jax.ShapeDtypeStruct(x, dtype))


def perceptron() -> Program:
    """Return a residual perceptron."""
    layer = lambda h, p: (h + jax.nn.gelu(h @ p["up"]) @ p["down"], None)
    return scanned(layer, types(jnp.float32, up=(256, 1024), down=(1024, 256)), 16, 128, 256)


def attention(kv_heads: int, group: int, dtype: Any) -> Program:
    """Return attention whose key heads serve `group` query heads each."""
    size, tokens = 32, 512
    width = kv_heads * group * size

    def layer(h: Any, p: Any) -> Any:
        q = jnp.einsum("btm,mkgd->btkgd", h, p["q"])
        k = jnp.einsum("btm,mkd->btkd", h, p["k"])
        v = jnp.einsum("btm,mkd->btkd", h, p["v"])
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / size**0.5
        scores = jnp.where(np.tri(tokens, dtype=bool), scores, -1e9)
        e = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
        out = jnp.einsum("bkgts,bskd->btkgd", e, v)
        out = out / jnp.einsum("bkgts->btkg", e)[..., None]
        return h + jnp.einsum("btkgd,kgdm->btm", out, p["o"]), None

    params = types(
        jnp.float32, q=(width, kv_heads, group, size), k=(width, kv_heads, size),
        v=(width, kv_heads, size), o=(kv_heads, group, size, width),
    )  # fmt: skip
    return scanned(layer, params, 2, tokens, width, dtype=dtype)


def experts() -> Program:
    """Return a mixture of four experts that all see all tokens."""

    def layer(h: Any, p: Any) -> Any:
        gates = jax.nn.softmax(h @ p["gate"], -1)
        hidden = jax.nn.silu(jnp.einsum("btm,emf->betf", h, p["up"]))
        out = jnp.einsum("betf,efm->betm", hidden, p["down"])
        return h + jnp.einsum("betm,bte->btm", out, gates), None

    params = types(jnp.float32, gate=(256, 4), up=(4, 256, 512), down=(4, 512, 256))
    return scanned(layer, params, 4, 256, 256)


def convolutions() -> Program:
    """Return residual convolutions."""
    dims = ("NHWC", "HWIO", "NHWC")

    def layer(h: Any, p: Any) -> Any:
        y = lax.conv_general_dilated(h, p["w"], (1, 1), "SAME", dimension_numbers=dims)
        return h + jax.nn.relu(y), None

    params = types(jnp.float32, w=(3, 3, 64, 64))
    return scanned(layer, params, 8, 32, 32, 64, dtype=jnp.float32)


def recurrent() -> Program:
    """Return an LSTM of 200 steps."""

    def loss(p: Any, x: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            h, c = state
            i, f, g, o = jnp.split(h @ p["w"] + x @ p["u"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((32, 128))
        return jnp.mean(lax.scan(step, (zeros, zeros), x)[1] ** 2)

    sizes = {"w": (128, 512), "u": (64, 512)}
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in sizes.items()}
    return loss, (params, jax.ShapeDtypeStruct((200, 32, 64), jnp.float32))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "perceptron": perceptron,
    "attention, 8 heads": functools.partial(attention, 8, 1, jnp.bfloat16),
    "attention, 8 heads, float32": functools.partial(attention, 8, 1, jnp.float32),
    "attention, 2 x 4 heads": functools.partial(attention, 2, 4, jnp.bfloat16),
    "attention, 2 x 4 heads, float32": functools.partial(attention, 2, 4, jnp.float32),
    "attention, 1 x 8 heads": functools.partial(attention, 1, 8, jnp.bfloat16),
    "mixture of experts": experts,
    "convolutions": convolutions,
    "LSTM": recurrent,
}


def compiled(gradient: Any, args: tuple[Any, ...]) -> MemoryReport:
    """Return the report of a gradient on the target."""
    return xform.memory_analysis(jax.jit(gradient), *args, target=TARGET)


def measure(make: Callable[[], Program]) -> list[MemoryReport]:
    """Return the reports of JAX's gradient, of xform's with shared layouts, and of xform's."""
    loss, args = make()
    of_jax, mine = compiled(jax.grad(loss), args), compiled(xform.grad(loss), args)
    with Steering(own_layouts=False).used():
        shared = compiled(xform.grad(make()[0]), args)
    return [of_jax, shared, mine]


def main() -> None:
    reports = {name: measure(make) for name, make in PROGRAMS.items()}
    temporary = {name: [r.temp_bytes / MIB for r in three] for name, three in reports.items()}
    rows = [
        [name, *(f"{size:.1f}" for size in temporary[name]),
         *(f"{r.moved_bytes / MIB:.0f}" for r in three[1:])]
        for name, three in reports.items()
    ]  # fmt: skip
    write_table(HERE, HEAD, rows, target=TARGET)
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    places = np.arange(len(temporary))
    for i, label in enumerate(("jax.grad", "xform.grad, shared layouts", "xform.grad")):
        axes.barh(places + 0.27 * (i - 1), [s[i] for s in temporary.values()], 0.25, label=label)
    axes.set_yticks(places, [*temporary])
    axes.invert_yaxis()
    axes.set_xlabel("temporary memory on an H100, MiB, by its compiler")
    axes.legend(loc="lower right")
    figure.savefig(HERE / "bytes.png", dpi=120)


if __name__ == "__main__":
    main()
