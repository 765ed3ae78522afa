"""Whether activations or parameters of large models take more bytes, from shapes alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict
from models.nets.presets import PRESETS, abstract, parameter_count

GB = 1e9
# Batch and sequence length.
SMALL, LARGE = (1, 2048), (4, 4096)


def kept(preset: str, batch: int, length: int, policy: Any) -> tuple[int, int]:
    """Return the parameters, and the bytes of residuals in bfloat16. Nothing is compiled."""
    config = dataclasses.replace(PRESETS[preset], context=length, dtype="bfloat16")
    model = abstract(config)
    graphdef, params = nnx.split(model)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    loss = lambda params, tokens: nnx.merge(graphdef, params).loss(tokens)
    plan = xform.plan(loss, params, tokens, policy=policy, verify=False)
    return parameter_count(model), plan.saved_bytes


def measure(quick: bool) -> Finding:
    """Measure Llama 7B and Llama-2 70B, saving everything and with the default."""
    everything, default = xform.policies.save_everything, None
    small = {p: kept("llama2-7b", *SMALL, policy) for p, policy in
             (("everything", everything), ("default", default))}  # fmt: skip
    large = {p: kept("llama2-70b", *LARGE, policy) for p, policy in
             (("everything", everything), ("default", default))}  # fmt: skip
    count, waits = small["everything"]
    big, theirs = large["everything"]
    # Weights and gradients in bfloat16; Adam's moments and master weights in float32.
    state = big * (2 + 2 + 12)
    per_token = waits / (SMALL[0] * SMALL[1])
    above = 2 * count / per_token
    return Finding(
        [
            Claim(
                "Activations often exceed the parameters: LLaMA-7B in half precision",
                "practitioners' guides",
                "activations grow with batch and length, parameters do not",
                f"parameters {2 * count / GB:.1f} GB; {SMALL[0]} x {SMALL[1]} tokens:"
                f" {waits / GB:.1f} GB saving everything, {small['default'][1] / GB:.1f} by"
                " xform's default",
                f"holds if a batch has {above:,.0f} tokens or more, saving everything",
            ),
            Claim(
                "Llama-2-70B at 4 x 4096 tokens in bfloat16 has more than 100 GB of activations",
                "practitioners' guides",
                "80 layers of width 8192",
                f"{theirs / GB:,.0f} GB saving everything, {large['default'][1] / GB:,.0f} by"
                " xform's default",
                verdict(theirs > 100 * GB, "wrong"),
            ),
            Claim(
                "... and that is more than weights and optimizer",
                "practitioners' guides",
                "16 bytes for each parameter with Adam in mixed precision",
                f"{theirs / GB:,.0f} GB against {state / GB:,.0f}; against the weights alone,"
                f" {2 * big / GB:,.0f}",
                verdict(
                    theirs > state,
                    "wrong: it is more than the weights alone" if theirs > 2 * big else "wrong",
                ),
            ),
        ],
        lambda figure: draw(
            figure,
            {
                "Llama 7B, 1 x 2048": (2 * count, 16 * count, waits, small["default"][1]),
                "Llama-2 70B, 4 x 4096": (2 * big, state, theirs, large["default"][1]),
            },
        ),
    )


def draw(figure: Figure, found: dict[str, tuple[float, ...]]) -> None:
    """Draw bars in GB."""
    names = ("weights, bfloat16", "weights and optimizer", "activations, all saved",
             "activations, xform's default")  # fmt: skip
    for axes, (title, sizes) in zip(figure.subplots(1, 2), found.items(), strict=True):
        axes.barh(names[::-1], [size / GB for size in sizes[::-1]], color="#2b6cb0")
        axes.set(title=title, xlabel="GB")
