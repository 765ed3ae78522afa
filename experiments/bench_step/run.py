"""Compare step time, and time to trace and lower, of xform's and JAX's value_and_grad."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from flax import nnx

import xform
from experiments.report import write_table
from experiments.timing import paired
from models.nets.llama import Llama, LlamaConfig
from models.nets.mlp import MLP, MLPConfig

HERE = Path(__file__).parent
# XLA:CPU drops the barriers that separate jax.checkpoint's recompute from the forward pass.
# Without this pass it keeps them, and JAX recomputes the same values as xform.
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}
DECODER = LlamaConfig(
    width=256, depth=6, heads=8, kv_heads=4, mlp_width=768, context=256, tie_embeddings=True
)
DEEP_MLP = MLPConfig(depth=12)

Loss = Callable[..., jax.Array]


def mlp(scan: bool, policy: str | None) -> tuple[Loss, tuple[Any, Any]]:
    """Return a residual MLP's mean square output, with its parameters and a batch of 1024."""
    config = dataclasses.replace(DEEP_MLP, scan_layers=scan, remat=policy)
    graphdef, params = nnx.split(MLP(config, rngs=nnx.Rngs(0)))
    batch = jax.random.normal(jax.random.key(1), (1024, config.inputs))
    return lambda p, x: jnp.mean(nnx.merge(graphdef, p)(x) ** 2), (params, batch)


def transformer(scan: bool, policy: str | None, depth: int = DECODER.depth):
    """Return a decoder's loss, with its parameters and a batch of four windows."""
    config = dataclasses.replace(DECODER, scan_layers=scan, remat=policy, depth=depth)
    graphdef, params = nnx.split(Llama(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (4, config.context + 1), 0, config.vocab)
    return lambda p, t: nnx.merge(graphdef, p).loss(t, chunk=None), (params, tokens)


def compiled(transform: Any, loss: Loss, args: Any, options: dict[str, str] | None = None) -> Any:
    """Compile the value and gradient."""
    return jax.jit(transform(loss), compiler_options=options).lower(*args).compile()


def trace_and_lower(transform: Any, loss: Loss, args: Any) -> float:
    """Return the seconds to trace and lower, with nothing cached for this function."""
    start = time.perf_counter()
    jax.jit(lambda *a: transform(loss)(*a)).lower(*args)
    return time.perf_counter() - start


def main() -> None:
    """Measure every row, write the table and the plot."""
    rows: list[list[str]] = []
    ratios: list[tuple[str, float, float, float]] = []
    cases = [("MLP, unrolled", mlp, False), ("MLP, scanned", mlp, True)]
    cases += [
        ("transformer, unrolled", transformer, False),
        ("transformer, scanned", transformer, True),
    ]
    for name, make, scan in cases:
        for policy in (None, "save_dots", "save_nothing"):
            loss, args = make(scan, policy)
            options = KEEP_BARRIERS if policy and not scan else None
            ours = compiled(xform.value_and_grad, loss, args)
            theirs = compiled(jax.value_and_grad, loss, args, options)
            middle, low, high = paired(ours, theirs, args)
            temp = [c.memory_analysis().temp_size_in_bytes / 2**20 for c in (ours, theirs)]
            label = f"{name}, {policy or 'no remat'}"
            ratios.append((label, middle, low, high))
            rows.append(
                [label, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", *(f"{t:.0f}" for t in temp)]
            )
            print(rows[-1], flush=True)
    loss, args = transformer(False, None, depth=48)
    lowering = []
    for i in range(5):
        pair = [xform.value_and_grad, jax.value_and_grad]
        times = {t: trace_and_lower(t, loss, args) for t in (pair if i % 2 else pair[::-1])}
        lowering.append(times[pair[0]] / times[pair[1]])
    low, middle, high = statistics.quantiles(lowering, n=4)
    rows.append(["trace + lower, transformer of 48 unrolled blocks", f"{middle:.3f}",
                 f"{low:.3f} to {high:.3f}", "", ""])  # fmt: skip
    ratios.append(("trace + lower, 48 blocks", middle, low, high))
    head = ["case", "time, xform / JAX (median)", "quartiles", "temp MiB, xform", "temp MiB, JAX"]
    write_table(HERE, head, rows)
    plot(ratios)


def plot(ratios: list[tuple[str, float, float, float]]) -> None:
    """Plot ratios with their quartiles."""
    figure, axes = plt.subplots(figsize=(8, 0.4 * len(ratios) + 1.2), layout="constrained")
    for i, (_, middle, low, high) in enumerate(reversed(ratios)):
        axes.plot([low, high], [i, i], color="tab:blue", linewidth=3, alpha=0.35)
        axes.plot(middle, i, "o", color="tab:blue")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(ratios)), [r[0] for r in reversed(ratios)])
    axes.set_xlabel("time of xform / time of JAX (dot: median of 9 pairs, bar: quartiles)")
    figure.suptitle("Jitted value_and_grad at the same policy (left of 1: xform is faster)")
    figure.savefig(HERE / "ratios.png", dpi=150)


if __name__ == "__main__":
    main()
