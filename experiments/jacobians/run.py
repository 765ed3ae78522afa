"""Products and time of Jacobians in the best order, relative to the pure modes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xform
from experiments.report import write_table
from experiments.timing import paired
from xform.jacobians.chain import (
    ChainLink,
    cheapest_order,
    forward_order,
    link_of_matrix,
    reverse_order,
)

HERE = Path(__file__).parent
HOURGLASS = (10, 512, 8, 512, 10)
SCALES = (4, 12, 24, 40)


def chain(sizes: Sequence[int]) -> list[ChainLink]:
    """Return dense factors between values of these sizes."""
    return [link_of_matrix(a, b) for a, b in itertools.pairwise(sizes)]


def least(sizes: tuple[int, ...]) -> int:
    """Return the fewest multiplications over all bracketings of dense factors."""
    if len(sizes) == 2:
        return 0
    inner = range(1, len(sizes) - 1)
    ends = sizes[0] * sizes[-1]
    return min(least(sizes[: k + 1]) + least(sizes[k:]) + ends * sizes[k] for k in inner)


def products() -> None:
    """Write the table of multiplications."""
    links = chain(HOURGLASS)
    counts = [order(links).flops / 2 for order in (cheapest_order, forward_order, reverse_order)]
    rows = [
        [" x ".join(map(str, HOURGLASS)), *(f"{n:,.0f}" for n in (*counts, least(HOURGLASS))), ""]
    ]
    draw = random.Random(0)
    for name, pure, step in (("falling", reverse_order, -1), ("rising", forward_order, 1)):
        chosen = unbeaten = 0
        for _ in range(3000):
            sizes = sorted(draw.randint(1, 1000) for _ in range(draw.randint(2, 9)))[::step]
            links = chain(sizes)
            order = cheapest_order(links)
            chosen += order.flops == pure(links).flops
            unbeaten += least(tuple(sizes)) == pure(links).flops / 2
        said = f"{pure.__name__} mode chosen in {chosen}, unbeaten in {unbeaten}"
        rows.append([f"3,000 {name} chains", "", "", "", "", said])
    head = ["sizes", "dynamic program", "forward", "reverse", "all bracketings", ""]
    write_table(HERE, head, rows, "products")


def mlp(ws: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Compute matrix products with tanh between them."""
    *inner, last = ws
    for w in inner:
        x = jnp.tanh(x @ w)
    return x @ last


def compiled(jacobian: Any, *args: Any) -> Any:
    return jax.jit(jacobian).lower(*args).compile()


def time() -> None:
    """Write the table of times."""
    rows: list[list[str]] = []
    for k in SCALES:
        sizes = [k * n for n in HOURGLASS]
        keys = jax.random.split(jax.random.key(0), len(sizes))
        ws = [jax.random.normal(key, pair) / pair[0] ** 0.5
              for key, pair in zip(keys, itertools.pairwise(sizes), strict=False)]  # fmt: skip
        x = jax.random.normal(keys[-1], (sizes[0],))
        ours = compiled(xform.jacobian(mlp, 1), ws, x)
        ways = {
            f"xform.jacobian, {mode}": compiled(xform.jacobian(mlp, 1, mode=mode), ws, x)
            for mode in ("forward", "reverse")
        }
        ways |= {f"jax.{t.__name__}": compiled(t(mlp, 1), ws, x) for t in (jax.jacfwd, jax.jacrev)}
        want = ways["jax.jacrev"](ws, x)
        for way in (ours, *ways.values()):
            np.testing.assert_allclose(way(ws, x), want, rtol=1e-3, atol=1e-5)
        said = xform.jacobian.explain(mlp, ws, x, argnums=1)
        pure = min(said.flops["forward"], said.flops["reverse"])
        cells = [str(k), f"{said.flops['mixed'] / pure:.2f}"]
        for pair in (list(ways)[:2], list(ways)[2:]):
            found = [paired(ours, ways[name], (ws, x)) for name in pair]
            middle, low, high = max(found)  # relative to the faster mode
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        rows.append(cells)
        print(rows[-1], flush=True)
    head = ["k", "FLOPs / better mode", "time / better mode of xform", "time / better mode of JAX"]
    write_table(HERE, head, rows, "time")


if __name__ == "__main__":
    products()
    time()
