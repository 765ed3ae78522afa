"""The bytes of activations: L b n d times a factor, and where attention outweighs the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict

KEEP = xform.policies.save_everything
HEAD = 64
# Layers, batch, length and width.
SIZES = [(depth, batch, n, d) for depth in (2, 4) for batch in (1, 2) for n in (128, 256, 512)
         for d in (128, 256)]  # fmt: skip
LENGTHS, WIDTH = (128, 256, 512, 1024, 2048, 4096, 8192), 768
Layer = Callable[[jax.Array, Any], jax.Array]


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute causal attention with all scores in memory."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD**-0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)


# A fused kernel saves its inputs and output, and makes the scores again: Dao et al.,
# arXiv:2205.14135. (It saves one more number for each row.)
fused = jax.checkpoint(plain)


def attended(x: jax.Array, p: Any, core: Any = plain) -> jax.Array:
    """Compute attention with its projections."""
    rows = (x @ p["qkv"]).reshape(*x.shape[:2], -1, 3 * HEAD)
    return core(*jnp.split(rows, 3, -1)).reshape(x.shape) @ p["out"]


def layer_norm(x: jax.Array) -> jax.Array:
    """Normalize rows to mean 0 and variance 1."""
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def rms_norm(x: jax.Array) -> jax.Array:
    """Divide rows by their root mean square."""
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def gelu_part(x: jax.Array, p: Any) -> jax.Array:
    """Compute the feed-forward part of GPT-2."""
    return x + jax.nn.gelu(layer_norm(x) @ p["up"]) @ p["down"]


def attention_part(x: jax.Array, p: Any, core: Any = plain) -> jax.Array:
    """Compute the attention part of GPT-2."""
    return x + attended(layer_norm(x), p, core)


def gpt(x: jax.Array, p: Any) -> jax.Array:
    """Compute a layer of GPT-2."""
    return gelu_part(attention_part(x, p), p)


def llama(x: jax.Array, p: Any) -> jax.Array:
    """Compute a layer of Llama, without rotation."""
    x = x + attended(rms_norm(x), p)
    h = rms_norm(x)
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def lstm(x: jax.Array, p: Any) -> jax.Array:
    """Compute a layer of LSTM along the sequence, with a residual path."""

    def step(state: Any, row: jax.Array) -> Any:
        h, c = state
        i, f, g, o = jnp.split(row + h @ p["again"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((x.shape[0], x.shape[2]), x.dtype)
    rows = jnp.swapaxes(x @ p["up"], 0, 1)
    return x + jnp.swapaxes(lax.scan(step, (zero, zero), rows)[1], 0, 1)


LAYERS: dict[str, Layer] = {"GPT-2": gpt, "Llama": llama, "LSTM": lstm}


def saved(layer: Layer, depth: int, batch: int, n: int, d: int) -> int:
    """Return the saved bytes of `depth` layers in bfloat16. Nothing is compiled."""
    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    p = {"qkv": half(depth, d, 3 * d), "out": half(depth, d, d), "up": half(depth, d, 4 * d),
         "gate": half(depth, d, 4 * d), "down": half(depth, 4 * d, d),
         "again": half(depth, d, 4 * d)}  # fmt: skip
    loss = lambda p, x: jnp.sum(lax.scan(lambda h, q: (layer(h, q), None), x, p)[0])
    return xform.plan(loss, p, half(batch, n, d), policy=KEEP, verify=False).saved_bytes


def fitted(layer: Layer, sizes: Any) -> tuple[float, float, float]:
    """Return the bytes for each L b n d, those for each L b h n², and the worst relative error."""
    rows = np.array([[L * b * n * d, L * b * (d // HEAD) * n**2] for L, b, n, d in sizes], float)
    bytes_ = np.array([saved(layer, *size) for size in sizes], float)
    (factor, square), *_ = np.linalg.lstsq(rows / bytes_[:, None], np.ones(len(sizes)), rcond=None)
    error = np.abs(rows @ [factor, square] / bytes_ - 1).max()
    return float(factor), float(square), float(error)


def crossing(one: list[int], other: list[int]) -> int | None:
    """Return the first length from which `one` takes more bytes."""
    return next((n for n, a, b in zip(LENGTHS, one, other, strict=True) if a > b), None)


def measure(quick: bool) -> Finding:
    """Fit three architectures, and compare the two parts of a layer of GPT-2 by length."""
    sizes = SIZES[:12] if quick else SIZES
    found = {name: fitted(layer, sizes) for name, layer in LAYERS.items()}
    parts = {
        "feed-forward": gelu_part,
        "attention": attention_part,
        "attention, fused": lambda x, p: attention_part(x, p, fused),
    }
    by = {name: [saved(part, 1, 1, n, WIDTH) for n in LENGTHS] for name, part in parts.items()}
    at = crossing(by["attention"], by["feed-forward"])
    never = crossing(by["attention, fused"], by["feed-forward"])
    attention, feed = (lambda n: 8 * n * WIDTH**2 + 4 * n**2 * WIDTH), 16 * WIDTH**2
    work = next(n for n in LENGTHS if attention(n) > feed * n)
    exact = max(e for *_, e in found.values())
    linear = {name: abs(square) < 0.1 for name, (_, square, _) in found.items()}
    scores = lambda s: f" + {s:.1f} L b h n²" if abs(s) > 0.1 else ""
    said = "; ".join(
        f"{n} {f:.1f} L b n d{scores(s)} (within {e:.0%})" for n, (f, s, e) in found.items()
    )
    return Finding(
        [
            Claim(
                "Activations take L b n d times a factor of the architecture",
                "practitioners' guides; Korthikanti et al., arXiv:2205.05198, equation 1",
                "34 bytes in half precision for GPT-2 with dropout, and 5 bytes for each score",
                f"bytes in bfloat16, saving everything, fitted over {len(sizes)} sizes: {said}",
                verdict(
                    all(linear.values()) and exact < 0.1,
                    "holds if scores are not saved: with them a term of h n² comes on top for "
                    + ", ".join(n for n, yes in linear.items() if not yes)
                    if exact < 0.1
                    else f"wrong: the fit is off by {exact:.0%}",
                ),
            ),
            Claim(
                "Attention outweighs the feed-forward part of long sequences",
                "Korthikanti et al., arXiv:2205.05198; Dao et al., arXiv:2205.14135",
                f"FLOPs: from n = 2 d = {2 * WIDTH:,} on, 8 n d² + 4 n² d against 16 n d²; saved"
                " bytes: earlier with all scores, never with a fused kernel",
                f"GPT-2's layer of width {WIDTH}, saved bytes: from {at or 'no length'} on, of the"
                " lengths tried;"
                f" fused: {never or f'at no length to {LENGTHS[-1]:,}'}; FLOPs: at {work:,}",
                verdict(
                    at and never,
                    f"holds if attention is not fused, from {at:,} tokens on" if at else "wrong",
                ),
            ),
        ],
        lambda figure: draw(figure, found, by),
    )


def draw(figure: Figure, found: Any, by: dict[str, list[int]]) -> None:
    """Draw the factors, and the bytes of each part by length."""
    left, right = figure.subplots(1, 2)
    left.bar([*found], [f for f, _, _ in found.values()], color="#2b6cb0")
    left.set(ylabel="bytes / (L b n d), bfloat16")
    for name, sizes in by.items():
        right.loglog(LENGTHS, [s / 2**20 for s in sizes], "o-", label=name)
    right.set(xlabel=f"tokens, one layer of width {WIDTH}", ylabel="saved MiB")
    right.legend(frameon=False, fontsize=8)
