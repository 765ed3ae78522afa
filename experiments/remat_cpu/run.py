"""Compiled memory and time of rematerialization on XLA:CPU, unrolled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp

import xform
from experiments.report import write_table
from experiments.timing import paired

HERE = Path(__file__).parent
LAYERS, WIDTH, HIDDEN, BATCH = 16, 256, 1024, 2048


def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Compute `x + gelu(x w1) w2`."""
    return x + jax.nn.gelu(x @ w[0]) @ w[1]


def loss_of(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the mean square of the result of sixteen layers, as a function."""
    return lambda ws, x: jnp.mean(functools.reduce(f, ws, x) ** 2)


def main() -> None:
    """Compile every row, compare the gradients, and time each relative to no remat."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    up = [jax.random.normal(k, (WIDTH, HIDDEN)) * 0.05 for k in keys]
    down = [jax.random.normal(k, (HIDDEN, WIDTH)) * 0.03 for k in keys]
    args: Any = (list(zip(up, down, strict=True)), jax.random.normal(keys[0], (BATCH, WIDTH)))
    dots = functools.partial(xform.remat, policy=xform.policies.save_dots)
    plain = loss_of(layer)
    ways = {
        "jax.grad": jax.grad(plain),
        "jax.grad, jax.checkpoint per layer": jax.grad(loss_of(jax.checkpoint(layer))),
        "xform.grad": xform.grad(plain),
        "xform.grad, xform.remat per layer": xform.grad(loss_of(xform.remat(layer))),
        "xform.grad, jax.checkpoint per layer": xform.grad(loss_of(jax.checkpoint(layer))),
        "xform.grad, save_dots per layer": xform.grad(loss_of(dots(layer))),
        "xform.grad, policy=save_dots": xform.grad(plain, policy=xform.policies.save_dots),
    }
    compiled = {name: jax.jit(g).lower(*args).compile() for name, g in ways.items()}
    base = compiled["jax.grad"]
    reference = base(*args)
    rows: list[list[str]] = []
    for name, run in compiled.items():
        chex.assert_trees_all_close(run(*args), reference, rtol=1e-4, atol=1e-6)
        temp = run.memory_analysis().temp_size_in_bytes
        share = temp / base.memory_analysis().temp_size_in_bytes
        middle, low, high = paired(run, base, args)
        rows.append([name, f"{temp / 1e6:.0f}", f"{share:.1%}", f"{middle:.2f}",
                     f"{low:.2f} to {high:.2f}"])  # fmt: skip
    write_table(HERE, ["gradient", "temp MB", "of jax.grad", "time / jax.grad", "quartiles"], rows)


if __name__ == "__main__":
    main()
