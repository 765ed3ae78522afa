"""When offloading a value to the host is better than recomputing it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict
from xform.planner.hardware import GPUS, TPUS

CHIPS = {"tpu:v5e:1x1": TPUS["v5e"], "gpu:a100-80": GPUS["a100-80"], "gpu:h100": GPUS["h100"]}
TARGET = "gpu:h100"
WIDTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
ROWS, DEPTH, SHARE = 8192, 8, 0.5


def crossover(device: Any) -> float:
    """Return the width where a bfloat16 product takes as long as sending its result to the host."""
    # A result of b bytes takes b / link; its product takes 2 w / 2 FLOPs for each byte.
    return device.flops_per_second / device.host_bytes_per_second


def loss(ws: Any, x: jax.Array) -> jax.Array:
    """Compute products of one width, each followed by a tanh."""
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x.astype(jnp.float32))


def sent(width: int) -> float:
    """Return the offloaded share of the bytes that a budget of half of them does not keep."""
    f = jax.ShapeDtypeStruct
    args = [f((width, width), jnp.bfloat16)] * DEPTH, f((ROWS, width), jnp.bfloat16)
    budget = xform.policies.budget(int(SHARE * DEPTH * ROWS * width * 2), of="saved")
    plan = xform.plan(loss, *args, policy=budget, target=TARGET, verify=False)
    moved = sum(row.marginal_bytes for row in plan if row.decision == "OFFLOAD")
    again = sum(row.marginal_bytes for row in plan if row.decision == "RECOMPUTE")
    return moved / (moved + again) if moved + again else 0.0


def measure(quick: bool) -> Finding:
    """Compute the crossover of each device, and the plans of budgets at several widths."""
    widths = WIDTHS[::2] if quick else WIDTHS
    shares = {w: sent(w) for w in widths}
    least = {name: crossover(device) for name, device in CHIPS.items()}
    # The copy back counts too. Both copies happen between the value's last use in the forward pass
    # and its first use in the backward pass.
    low = [w for w in widths if w < least[TARGET] / 8]
    falls = np.all(np.diff([*shares.values()]) >= -0.2)
    return Finding(
        [
            Claim(
                "Values can be sent to the host and back while the device computes",
                "Rhu et al., vDNN, arXiv:1602.08124",
                "a product of width w covers its result's way in one direction if w > FLOPs per"
                " second / bytes per second of the link: "
                + ", ".join(f"{n} {w:,.0f}" for n, w in least.items()),
                f"{DEPTH} products on an {TARGET}, half of the bytes allowed; of what is not kept,"
                " the part that is sent: "
                + ", ".join(f"{s:.0%} at {w:,}" for w, s in shares.items())
                + ". By a model of time: no device was at hand",
                verdict(
                    bool(low) and falls and shares[widths[-1]] > shares[widths[0]],
                    "holds at every width tried: several products lie between a value's last use"
                    " and its first one back"
                    if min(shares.values()) > 0.3
                    else "wrong by this model"
                    if max(shares.values()) < 0.1
                    else "holds if there are enough products in between",
                ),
            )
        ],
        lambda figure: draw(figure, shares, least),
    )


def draw(figure: Figure, shares: dict[int, float], least: dict[str, float]) -> None:
    """Draw the offloaded share by width, and the crossovers."""
    axes = figure.subplots()
    axes.semilogx([*shares], [*shares.values()], "o-", label=f"sent, {TARGET}")
    for i, (name, width) in enumerate(least.items()):
        axes.axvline(width, color=f"C{i + 1}", linestyle=":", label=f"crossover, {name}")
    axes.set(xlabel="width of the products", ylabel="part sent of what is not kept")
    axes.legend(frameon=False)
