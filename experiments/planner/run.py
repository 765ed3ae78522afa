"""Bytes and time of what `xform.grad` saves by default, against `jax.grad`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

import xform
from experiments.bench_step.run import mlp, transformer
from experiments.report import write_table
from experiments.timing import paired

Transform = Callable[..., Any]
Name = Callable[[jax.Array, str], jax.Array]
HERE = Path(__file__).parent
HEAD = ["case", "temp MiB", "of jax.grad", "ratio", "saved MiB", "GFLOP of dots again",
        "time ratio", "quartiles"]  # fmt: skip
WIDTH, LENGTH, BATCH, HEADS, LAYERS = 256, 512, 4, 8, 12


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Layer normalization without an offset."""
    centered = x - x.mean(-1, keepdims=True)
    return centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5) * gain


def block(x: jax.Array, p: dict[str, jax.Array], name: Name = lambda x, _: x) -> jax.Array:
    """A transformer layer: causal attention, and a perceptron of four times the width.

    `name` may give its values names.
    """
    h = norm(x, p["g1"])
    split = lambda y: y.reshape(BATCH, LENGTH, HEADS, -1).transpose(0, 2, 1, 3)
    q, k, v = (split(name(h @ p[key], key)) for key in "qkv")
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k) * (WIDTH // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e30)
    mixed = jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores), v)
    x = x + name(mixed.transpose(0, 2, 1, 3).reshape(x.shape) @ p["o"], "attention")
    return x + jax.nn.gelu(name(norm(x, p["g2"]) @ p["up"], "up")) @ p["down"]


def inputs(layers: int) -> tuple[dict[str, jax.Array], jax.Array]:
    """Stacked parameters, and a batch."""
    sizes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH),
             "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = {name: 0.02 * jax.random.normal(key, (layers, *shape))
              for key, (name, shape) in zip(keys, sizes.items(), strict=True)}  # fmt: skip
    params |= {"g1": jnp.ones((layers, WIDTH)), "g2": jnp.ones((layers, WIDTH))}
    return params, jax.random.normal(keys[0], (BATCH, LENGTH, WIDTH))


def layers(scan: bool, n: int, one: Callable[..., Any] = block) -> Callable[..., jax.Array]:
    """The mean square of what n layers make of their input."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        if scan:
            x, _ = lax.scan(lambda x, p: (one(x, p), None), x, params)
        else:
            for i in range(n):
                x = one(x, {name: p[i] for name, p in params.items()})
        return jnp.mean(x**2)

    return loss


def blocks(scan: bool, _: None = None) -> tuple[Callable[..., jax.Array], tuple[Any, Any]]:
    """Twelve layers, and random numbers."""
    return layers(scan, LAYERS), inputs(LAYERS)


def dot_flops(jaxpr: Any, trips: int = 1) -> int:
    """FLOPs of the matrix products of a jaxpr, in all trips of its loops."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            thick = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            total += 2 * trips * thick * eqn.outvars[0].aval.size
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner, "eqns"):
                total += dot_flops(inner, trips * eqn.params.get("length", 1))
    return total


def main() -> None:
    """Compile each pair, compare the gradients, time them, and write the table."""
    rows: list[list[str]] = []
    for name, make in {"block": blocks, "MLP": mlp, "transformer": transformer}.items():
        for scan in (True, False):
            loss, args = make(scan, None)
            ways = [xform.value_and_grad(loss), jax.value_and_grad(loss)]
            again, usual = (dot_flops(jax.make_jaxpr(g)(*args).jaxpr) for g in ways)
            ours, theirs = (jax.jit(g).lower(*args).compile() for g in ways)
            chex.assert_trees_all_close(ours(*args), theirs(*args), rtol=1e-3, atol=1e-5)
            temp = [c.memory_analysis().temp_size_in_bytes / 2**20 for c in (ours, theirs)]
            kept = xform.residuals(loss, *args, argnums=0).total_bytes / 2**20
            middle, low, high = paired(ours, theirs, args)
            rows.append([
                f"{name}, {'scanned' if scan else 'unrolled'}",
                f"{temp[0]:.0f}", f"{temp[1]:.0f}", f"{temp[0] / temp[1]:.3f}", f"{kept:.0f}",
                f"{(again - usual) / 1e9:.3f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}",
            ])  # fmt: skip
            print(rows[-1])
    write_table(HERE, HEAD, rows)


if __name__ == "__main__":
    main()
