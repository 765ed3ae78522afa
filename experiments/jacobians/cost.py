"""Program text, compile time and temporary bytes of Jacobians, relative to JAX's."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

import xform
from experiments.report import write_table

HERE = Path(__file__).parent
UNARY = "sqrt exp log sin tanh cbrt arcsin log1p square reciprocal"
FUNCTIONS: dict[str, Callable[[Any], Any]] = {name: getattr(jnp, name) for name in UNARY.split()}
FUNCTIONS |= {
    "x ** 3": lambda x: x**3,
    "cumsum": lambda x: jnp.cumsum(jnp.sin(x)),
    "softmax": jax.nn.softmax,
    "roll": lambda x: x * jnp.roll(x, 1) ** 2,
    "ratio": lambda x: x / (1 + x**2),
    "sort": jnp.sort,
    "logsumexp": logsumexp,
    "norm": jnp.linalg.norm,
    "rosenbrock": lambda x: jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2),
    "product": lambda x: jnp.sum(jnp.sin(x) * jnp.roll(x, 1)),
}
SIZES = 10, 300, 3000
KINDS = "jacfwd", "jacrev", "hessian"


PAIRS = 3


def cost(library: Any, kind: str, f: Any, x: jax.Array) -> tuple[int, float, int]:
    """Return characters of the program, processor seconds of its compilation, and temporary bytes.

    Processor time, of all threads, does not depend on how busy the machine is.
    """
    jax.clear_caches()
    lowered = jax.jit(getattr(library, kind)(f)).lower(x)
    start = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - start
    return len(lowered.as_text()), seconds, compiled.memory_analysis().temp_size_in_bytes


def ratios(kind: str, f: Any, x: jax.Array) -> list[float]:
    """Return xform's costs relative to JAX's: the medians of alternating pairs."""
    pairs = [[cost(t, kind, f, x) for t in (xform, jax)] for _ in range(PAIRS)]
    each = [[a / b if b else 1.0 + a for a, b in zip(*pair, strict=True)] for pair in pairs]
    return [statistics.median(column) for column in zip(*each, strict=True)]


def main() -> None:
    """Write one row for each function: the largest ratio over the sizes, for each transform."""
    rows = []
    for name, f in FUNCTIONS.items():
        cells = [name]
        for kind in KINDS:
            found = []
            for n in SIZES:
                x = jnp.linspace(0.1, 0.9, n)
                size = jax.eval_shape(f, x).size * n * (n if kind == "hessian" else 1)
                if size <= 30_000_000:
                    found.append(ratios(kind, f, x))
            cells.append(" / ".join(f"{max(r):.2f}" for r in zip(*found, strict=True)))
        rows.append(cells)
        print(*cells, sep=" | ", flush=True)
    write_table(HERE, ["function", *KINDS], rows, sys.argv[1])


if __name__ == "__main__":
    main()
