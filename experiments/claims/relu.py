"""Whether recomputing a ReLU is better than reading it from memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, spread, verdict
from xform.planner.hardware import GPUS, TPUS, Hardware

ROWS, WIDTH, DEPTH = 4096, 512, 8
DEVICES: dict[str, Hardware] = {
    "v5e": TPUS["v5e"],
    "a100-80": GPUS["a100-80"],
    "h100": GPUS["h100"],
}


def loss(ws: Any, x: jax.Array) -> jax.Array:
    """Compute layers of a product, a normalization of rows and a ReLU."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        y = h @ w
        y = y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6)
        return jax.nn.relu(y), None

    return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)


def report(grad: Any) -> Any:
    """Compile the gradient on the CPU, and report the bytes that it moves."""
    f32 = jnp.float32
    ws, x = (
        jax.ShapeDtypeStruct((DEPTH, WIDTH, WIDTH), f32),
        jax.ShapeDtypeStruct((ROWS, WIDTH), f32),
    )
    return xform.memory_analysis(grad(loss, (0, 1)), ws, x, target="cpu")


def measure(quick: bool) -> Finding:
    """Estimate the time of a layer's ReLU both ways, and count the compiled bytes moved."""
    elements = ROWS * WIDTH
    # If saved, a one-byte mask is written and read. If recomputed, its input is available anyway.
    read = {n: 2 * elements / (d.bytes_per_second or 1) for n, d in DEVICES.items()}
    again = {n: elements / (d.f32_flops_per_second or 1) for n, d in DEVICES.items()}
    ratio = {n: read[n] / again[n] for n in DEVICES}
    product = 2 * elements * WIDTH
    bound = {
        n: (3 * 4 * elements / (d.bytes_per_second or 1)) / (product / (d.flops_per_second or 1))
        for n, d in DEVICES.items()
    }
    usual, default = report(jax.grad), report(xform.grad)
    moved = default.moved_bytes / usual.moved_bytes
    temp = default.temp_bytes / usual.temp_bytes
    fast = all(r > 1 for r in ratio.values())
    return Finding(
        [
            Claim(
                "Recompute a ReLU rather than read it from memory",
                "Jain et al., Checkmate, arXiv:1910.02653; NVIDIA's performance guides",
                "one FLOP for an element against a byte written and a byte read",
                "seconds to save and read over seconds to run again, by the roofline: "
                + ", ".join(f"{n} {r:.0f}" for n, r in ratio.items())
                + "; compiled for a CPU, xform's default, which runs normalizations and ReLUs"
                f" again, moves {moved:.2f} of the bytes that jax.grad moves, in {temp:.2f} of its"
                " temporary bytes",
                verdict(fast and moved < 1, "wrong"),
            ),
            Claim(
                "Bandwidth is the bottleneck",
                "Williams, Waterman, Patterson, Roofline, 2009",
                "of elementwise layers always; of a product of width d if d is below the device's"
                " FLOPs for a byte",
                f"a layer's elementwise traffic over its product's time at width {WIDTH}: "
                + ", ".join(f"{n} {r:.2f}" for n, r in bound.items()),
                verdict(
                    min(bound.values()) > 1,
                    "holds if the layer is narrower than"
                    f" {spread([WIDTH * r for r in bound.values()], 0)} columns",
                ),
            ),
        ],
        lambda figure: draw(figure, read, again),
    )


def draw(figure: Figure, read: dict[str, float], again: dict[str, float]) -> None:
    """Draw the seconds on each device."""
    axes = figure.subplots()
    for i, (name, seconds) in enumerate((("save and read", read), ("run again", again))):
        axes.bar([x + 0.38 * i for x in range(len(seconds))],
                 [1e6 * s for s in seconds.values()], 0.36, label=name)  # fmt: skip
    axes.set_xticks([x + 0.19 for x in range(len(read))], [*read])
    axes.set(yscale="log", ylabel="microseconds for a ReLU of 4096 x 512, roofline")
    axes.legend(frameon=False)
