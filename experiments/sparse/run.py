"""Products and time of sparse derivatives, relative to asdex; of Laplacians, to folx."""

from __future__ import annotations

import argparse
import importlib.util
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xform
from experiments.report import write_table
from experiments.sparse.problems import HESSIANS, JACOBIANS, Point, five_points
from experiments.timing import paired

HERE = Path(__file__).parent
SIZES = (10_000, 100_000)
SMALL, POINTS = 60, 4
HEAD = ["problem", "of", "size", "nonzeros", "products", "asdex's", "prepared in s", "asdex",
        "evaluated in ms", "time / asdex's", "quartiles"]  # fmt: skip
WIDTHS = ((8, 64), (16, 128), (32, 256))
LAPLACIANS = ["network", "inputs", "FLOPs / trace of the Hessian", "time / trace", "quartiles",
              "time / folx's", "quartiles"]  # fmt: skip


def check(make: Callable[[int], Point], kind: str) -> None:
    """Check a small problem's matrix and pattern against JAX's dense one at random points."""
    f, x = flat(make(SMALL))
    of = jax.jacfwd(f) if kind == "jacobian" else jax.hessian(f)
    every = [getattr(xform.sparse, kind)(f)]
    every += [xform.sparse.hessian(f, coloring="acyclic")] if kind == "hessian" else []
    pattern = xform.sparse.sparsity(f, x, of=kind)
    for seed in range(POINTS):
        at = jnp.asarray(np.random.default_rng(seed).normal(size=x.shape))
        truth = of(at)
        assert pattern.contains(np.asarray(truth))
        for matrix in every:
            np.testing.assert_allclose(matrix(at).todense(), truth, rtol=1e-9, atol=1e-9)


def flat(problem: Point) -> Point:
    """Return the problem on vectors. Asdex counts elements of arrays with more axes in 32 bits."""
    f, x = problem
    scalar = not jax.eval_shape(f, x).shape
    return lambda v: f(v.reshape(x.shape)) if scalar else f(v.reshape(x.shape)).ravel(), x.ravel()


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a function, and the seconds that it takes."""
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def theirs(f: Callable[..., Any], x: Any, kind: str) -> tuple[Any, int, float]:
    """Return asdex's function, the number of its products, and the seconds of its preparation."""
    import asdex

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", asdex.DenseColoringWarning)
        coloring, seconds = timed(lambda: getattr(asdex, f"{kind}_coloring")(f, x))
    run = getattr(asdex, f"{kind}_from_coloring")(f, coloring)
    return jax.jit(lambda x: run(x).data), coloring.num_colors, seconds


def row(name: str, make: Callable[[int], Point], kind: str, size: int, pairs: int, other: bool,
        **options: Any) -> list[str]:  # fmt: skip
    """Return a problem's row: prepare it uncached, then evaluate it in turns with asdex."""
    f, x = flat(make(size))
    matrix = getattr(xform.sparse, kind)(f, **options)
    prepared, seconds = timed(lambda: matrix.prepare(x))
    ours = jax.jit(lambda x: matrix(x).data)
    jax.block_until_ready(ours(x))
    times = [timed(lambda: jax.block_until_ready(ours(x)))[1] for _ in range(pairs)]
    cells = [name, kind, str(x.size), str(prepared.pattern.nonzeros), _products(prepared.coloring)]
    if not other:
        return [*cells, "", f"{seconds:.2f}", "", f"{1e3 * np.median(times):.2f}", "", ""]
    run, colors, their_seconds = theirs(f, x, kind)
    middle, low, high = paired(ours, run, (x,), pairs)
    ratio = [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
    return [*cells, str(colors), f"{seconds:.2f}", f"{their_seconds:.2f}",
            f"{1e3 * np.median(times):.2f}", *ratio]  # fmt: skip


def _products(coloring: Any) -> str:
    return f"{coloring.evaluations} ({coloring.kind})"


def matrices(pairs: int, other: bool) -> None:
    """Write every problem and size, without asdex where it takes minutes."""
    jax.config.update("jax_enable_x64", True)
    rows: list[list[str]] = []
    for kind, problems in (("jacobian", JACOBIANS), ("hessian", HESSIANS)):
        for name, make in problems.items():
            check(make, kind)
            timed(lambda make=make, kind=kind: row("", make, kind, 30, 2, other))  # compiles numba
            for size in SIZES:
                # An arrow is dense for a library that colours only columns or only rows.
                beside = other and not (name == "arrow" and size > 10_000)
                ways: list[dict[str, Any]] = [{}]
                ways += [{"coloring": "acyclic"}] if kind == "hessian" else []
                for options in ways:
                    rows.append(row(name, make, kind, size, pairs, beside and not options,
                                    **options))  # fmt: skip
                    print(rows[-1], flush=True)
    write_table(HERE, HEAD, rows)
    f, x = five_points(64)
    prepared = xform.sparse.jacobian(f).prepare(x)
    prepared.pattern.plot(HERE / "pattern.png", coloring=prepared.coloring)


def network(n: int, width: int) -> Callable[[Any], Any]:
    """Return a scalar function of `n` numbers: three hidden layers."""
    shapes = ((n, width), (width, width), (width, width))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    weights = [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True)]

    def f(x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    return f


def by_products(f: Callable[..., Any], n: int) -> Callable[[Any], Any]:
    """Return the trace of JAX's Hessian, by pushing each input through the gradient."""
    gradient = jax.grad(f)

    def trace(x: Any) -> Any:
        push = lambda v: jnp.vdot(jax.jvp(gradient, (x,), (v,))[1], v)
        return jnp.sum(jax.vmap(push)(jnp.eye(n)))

    return trace


def laplacians(pairs: int, other: bool) -> None:
    """Write batches of 32 points, in float32."""
    jax.config.update("jax_enable_x64", False)
    rows: list[list[str]] = []
    for n, width in WIDTHS:
        f = network(n, width)
        x = jax.random.normal(jax.random.key(1), (32, n))
        ours, trace = (jax.jit(jax.vmap(g)) for g in (xform.sparse.laplacian(f), by_products(f, n)))
        np.testing.assert_allclose(ours(x), trace(x), rtol=2e-3, atol=2e-3)
        middle, low, high = paired(ours, trace, (x,), pairs)
        flops = [g.lower(x).compile().cost_analysis()["flops"] for g in (ours, trace)]
        cells = [f"3 x {width}", str(n), f"{flops[0] / flops[1]:.2f}"]
        cells += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        if other:
            import folx

            forward = folx.forward_laplacian(f)
            folxs = jax.jit(jax.vmap(lambda x: forward(x).laplacian))  # noqa: B023
            np.testing.assert_allclose(ours(x), folxs(x), rtol=2e-3, atol=2e-3)
            middle, low, high = paired(ours, folxs, (x,), pairs)
            cells += [f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        rows.append([*cells, *[""] * (len(LAPLACIANS) - len(cells))])
        print(rows[-1], flush=True)
    write_table(HERE, LAPLACIANS, rows, "laplacian")


def main() -> None:
    """Write both tables and the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=["matrices", "laplacians"])
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    there = lambda name: importlib.util.find_spec(name) is not None
    if args.what != "laplacians":
        matrices(args.pairs, there("asdex"))
    if args.what != "matrices":
        laplacians(4 * args.pairs + 5, there("folx"))


if __name__ == "__main__":
    main()
