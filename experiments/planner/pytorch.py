"""Four unrolled layers at the bytes that PyTorch saves, and the products that are run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

import xform
from experiments.planner.run import Transform, block, dot_flops, inputs
from experiments.report import write_table

HERE = Path(__file__).parent
LAYERS, MIB = 4, 2**20
HEAD = ["budget of PyTorch", "MiB saved a layer: PyTorch", "xform",
        "GFLOP of dots run again a layer: PyTorch", "xform"]  # fmt: skip

# PyTorch 2.13's min-cut partitioner on this block, measured on one machine: budget, MiB saved and
# GFLOP of products run again, for each layer; without parameters and the first block's input.
POINTS = [
    (1.0, 64.3, 0.0), (0.9, 52.3, 0.0), (0.75, 44.3, 0.134), (0.6, 36.3, 0.268),
    (0.5, 28.3, 0.403), (0.4, 20.3, 0.537), (0.25, 15.9, 1.074), (0.1, 6.3, 2.349),
    # Its last point keeps each block's input outside of what it counts; here it is counted.
    (0.0, 1.5, 4.03),
]  # fmt: skip


def layers(params: Any, x: jax.Array) -> jax.Array:
    """Four layers, one after the other."""
    for i in range(LAYERS):
        x = block(x, {name: p[i] for name, p in params.items()})
    return x


def main() -> None:
    """Plan at each point, count, and write the table. Nothing is compiled."""
    params, x = inputs(LAYERS)

    def flops(vjp: Transform, **how: Any) -> int:
        def both(params: Any, x: jax.Array) -> Any:
            y, pull = vjp(layers, params, x, **how)
            return y, pull(y)

        return dot_flops(jax.make_jaxpr(both)(params, x).jaxpr)

    usual = flops(jax.vjp)
    rows: list[list[str]] = []
    for name, mebibytes, gflop in POINTS:
        policy = xform.policies.budget(int(mebibytes * LAYERS * MIB), of="saved")
        saved = xform.residuals(layers, params, x, policy=policy).total_bytes / LAYERS / MIB
        again = (flops(xform.vjp, policy=policy) - usual) / LAYERS / 1e9
        rows.append([str(name), str(mebibytes), f"{saved:.1f}", f"{gflop:.3f}", f"{again:.3f}"])
    write_table(HERE, HEAD, rows, "pytorch")


if __name__ == "__main__":
    main()
