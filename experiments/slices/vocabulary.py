"""Temporary bytes of a linear layer with cross-entropy over many words, by each compiler."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import xform
from experiments.report import write_table
from xform.errors import BudgetInfeasible

HERE = Path(__file__).parent
MIB = 2**20
BATCH, LENGTH, WIDTH = 8, 1024, 1024
HEAD = ["target", "words", "weights", "logits", "jax.grad temp", "xform.grad temp", "slices temp",
        "ratio", "slices", "seconds"]  # fmt: skip
# The budget for the temporary bytes, relative to those of jax.grad.
BAR = 0.15


def loss(w: Any, h: Any, y: Any) -> Any:
    """Return the cross-entropy of float32 logits, for weights of any float type."""
    logits = jnp.einsum("btd,dv->btv", h, w, preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def arguments(words: int, dtype: str) -> tuple[Any, ...]:
    of = jax.ShapeDtypeStruct
    return (
        of((WIDTH, words), dtype),
        of((BATCH, LENGTH, WIDTH), dtype),
        of((BATCH, LENGTH), "int32"),
    )


def row(target: str, words: int, dtype: str) -> list[str]:
    """Return one row of the table."""
    args = arguments(words, dtype)
    report = lambda f: xform.memory_analysis(f, *args, target=target)
    of_jax = report(jax.value_and_grad(loss, (0, 1)))
    default = report(xform.value_and_grad(loss, (0, 1)))
    outside = of_jax.total_bytes - of_jax.temp_bytes
    budget = outside + int(BAR * of_jax.temp_bytes)
    logits = 4 * BATCH * LENGTH * words
    start = time.perf_counter()
    try:
        plan = xform.plan(
            loss, *args, argnums=(0, 1), policy=f"slices:budget:{budget}", target=target
        )
        temp = report(xform.value_and_grad(loss, (0, 1), policy=plan)).temp_bytes
        chosen = "; ".join(text.partition(" (")[0] for text in plan.sliced_regions)
    except BudgetInfeasible as error:
        temp, chosen = error.floor_bytes - outside, f"refused: {error.problem}"
    seconds = time.perf_counter() - start
    sizes = [f"{n / MIB:.1f} MiB" for n in (logits, of_jax.temp_bytes, default.temp_bytes, temp)]
    return [target, f"{words:,}", dtype, *sizes, f"{temp / of_jax.temp_bytes:.3f}", chosen,
            f"{seconds:.0f}"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cpu", help="the device to compile for")
    parser.add_argument("--words", type=int, nargs="*", default=[32_000, 128_000])
    target, words = (options := parser.parse_args()).target, options.words
    rows: list[list[str]] = []
    for dtype in ("bfloat16", "float32"):
        for n in words:
            rows.append(row(target, n, dtype))
            print(*rows[-1], sep=" | ", flush=True)
    write_table(HERE, HEAD, rows, f"vocabulary-{target.partition(':')[0]}", target)


if __name__ == "__main__":
    main()
