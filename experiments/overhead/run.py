"""The Python time of derivatives, relative to JAX: to trace, to lower and to run eagerly."""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import xform
from experiments.bench_step.run import transformer
from experiments.report import write_table
from models.nets.llama import Llama, LlamaConfig
from models.nets.mlp import MLP, MLPConfig
from xform import policies

HERE = Path(__file__).parent
HEAD = ["what is timed", "program", "xform / JAX (median)", "quartiles", "ms, xform", "ms, JAX"]
# Small enough that arithmetic takes no time. The rest is Python.
SMALL_MLP = MLPConfig(inputs=8, width=8, hidden=16, outputs=8, depth=4, scan_layers=False)
SMALL_TRANSFORMER = LlamaConfig(
    vocab=16,
    context=8,
    width=16,
    depth=2,
    heads=4,
    kv_heads=2,
    mlp_width=16,
    scan_layers=False,
    tie_embeddings=True,
)

Program = tuple[Callable[..., jax.Array], tuple[Any, Any]]
Run = Callable[[], Any]


def plain_mlp() -> Program:
    """Return eight dense layers in `jax.numpy`."""
    keys = jax.random.split(jax.random.key(0), 8)
    params = [(jax.random.normal(k, (8, 8)) / 3, jnp.zeros(8)) for k in keys]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return jnp.mean(x**2)

    return loss, (params, jnp.ones((4, 8)))


def flax_mlp() -> Program:
    """Return the residual MLP of `models`, with four blocks."""
    graphdef, params = nnx.split(MLP(SMALL_MLP, rngs=nnx.Rngs(0)))
    return lambda p, x: jnp.mean(nnx.merge(graphdef, p)(x) ** 2), (params, jnp.ones((4, 8)))


def flax_transformer() -> Program:
    """Return the decoder of `models`, with two blocks."""
    graphdef, params = nnx.split(Llama(SMALL_TRANSFORMER, rngs=nnx.Rngs(0)))
    tokens = jnp.arange(18).reshape(2, 9) % SMALL_TRANSFORMER.vocab
    return lambda p, t: nnx.merge(graphdef, p).loss(t, chunk=None), (params, tokens)


PROGRAMS = {
    "MLP, plain functions": plain_mlp,
    "MLP, Flax": flax_mlp,
    "transformer, Flax": flax_transformer,
}


def seconds(run: Run) -> float:
    """Return the CPU seconds of a call in this process; other processes do not count."""
    gc.collect()
    start = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - start


def compared(make: Callable[[Any], Run], pairs: int, calls: int = 1) -> list[str]:
    """Return cells for times of `make(xform)` over `make(jax)`, in turns of `calls` calls."""

    def repeated(run: Run) -> Run:
        return lambda: [run() for _ in range(calls)][-1]

    both = repeated(make(xform)), repeated(make(jax))
    for run in both:
        seconds(run)
    times: list[tuple[float, float]] = []
    for i in range(pairs):
        first = seconds(both[i % 2])
        second = seconds(both[1 - i % 2])
        times.append((second, first) if i % 2 else (first, second))
    low, middle, high = statistics.quantiles((a / b for a, b in times), n=4)
    each = (statistics.median(column) / calls for column in zip(*times, strict=True))
    return [f"{middle:.2f}", f"{low:.2f} to {high:.2f}", *(f"{1000 * t:.1f}" for t in each)]


def gradient(lib: Any, loss: Any, params: Any, batch: Any) -> Run:
    """Return a run of the gradient of `loss`, operation by operation."""
    return lambda: lib.grad(loss)(params, batch)


def push(lib: Any, loss: Any, params: Any, batch: Any) -> Run:
    """Return a run of `loss` and its derivative in one direction, operation by operation."""
    tangents = jax.tree.map(jnp.ones_like, params)
    return lambda: lib.jvp(lambda p: loss(p, batch), (params,), (tangents,))


def push_traced(lib: Any, loss: Any, params: Any, batch: Any) -> Run:
    """Return a run that traces the same."""
    tangents = jax.tree.map(jnp.ones_like, params)
    jvp = lambda p, dp: lib.jvp(lambda p: loss(p, batch), (p,), (dp,))
    # A new function each time, so that no cached trace is found.
    return lambda: jax.make_jaxpr(lambda p, dp: jvp(p, dp))(params, tangents) and None


def lowered(lib: Any, loss: Any, params: Any, batch: Any, **how: Any) -> Run:
    """Return a run that traces and lowers `value_and_grad`."""
    f = lib.value_and_grad(loss, **(how if lib is xform else {}))
    return lambda: jax.jit(lambda *args: f(*args)).lower(params, batch) and None


KINDS: dict[str, tuple[Callable[..., Run], int]] = {
    "eager `grad`": (gradient, 5),
    "eager `jvp`": (push, 5),
    "trace of `jvp`": (push_traced, 3),
}


def rows(pairs: int, depth: int, only: str | None) -> Iterator[list[str]]:
    """Return the rows of the table."""
    for kind, (run, calls) in KINDS.items():
        for name, program in PROGRAMS.items():
            if only in (None, kind.replace("`", "")):
                loss, args = program()
                make = functools.partial(run, loss=loss, params=args[0], batch=args[1])
                yield [kind, name, *compared(make, pairs, calls)]
    if only in (None, "lower"):
        loss, args = transformer(False, None, depth=depth)
        make = functools.partial(lowered, loss=loss, params=args[0], batch=args[1])
        name, what = f"{depth} unrolled transformer layers", "trace + lower of `value_and_grad`"
        yield [f"{what}, default", name, *compared(make, pairs)]
        equal = functools.partial(make, policy=policies.save_everything)
        yield [f"{what}, equal saves", name, *compared(equal, pairs)]


def main() -> None:
    """Measure every row and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--depth", type=int, default=48, help="layers of the lowered transformer")
    only = [kind.replace("`", "") for kind in KINDS]
    parser.add_argument("--only", choices=[*only, "lower"], help="print only one kind")
    options = parser.parse_args()
    found: list[list[str]] = []
    for row in rows(options.pairs, options.depth, options.only):
        print(row, flush=True)
        found.append(row)
    if not options.only:
        write_table(HERE, HEAD, found)


if __name__ == "__main__":
    main()
