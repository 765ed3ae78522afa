"""Derivatives at inner values of a graph, at cut edges, and at values without parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, exponent, verdict
from experiments.claims.programs import normal
from xform.interpret.cost import program_flops

POINT, PUBLISHED = (3.3, 1.1, 2.3), (-0.285274, -1.01578, 0.288027)
INNER = ("square", "quotient", "sum", "cosh", "product", "tanh", "total", "sin", "exp", "log")
DEPTHS, WIDTH, ROWS = (1, 2, 4, 8, 16), 64, 32
KEEP = xform.policies.save_everything
Mark = Callable[[Any, str], Any]


def worked(x: Any, y: Any, z: Any, mark: Mark = xform.adjoints.name, np: Any = jnp) -> Any:
    """Compute sin(cosh(y² + x/z) + tanh(xyz)) / log(1 + eˣ), with a mark at each inner value."""
    total = mark(mark(y**2, "square") + mark(x / z, "quotient"), "sum")
    inner = mark(np.cosh(total), "cosh") + mark(np.tanh(mark(x * y * z, "product")), "tanh")
    below = mark(np.log(1 + mark(np.exp(x), "exp")), "log")
    return mark(np.sin(mark(inner, "total")), "sin") / below


def cut(name: str) -> tuple[float, float]:
    """Return an inner value, and the derivative by it of the function with its in-edges cut.

    The function is computed in NumPy with the value replaced by a number. The derivative is the
    imaginary part of a complex step, which is exact to rounding: Squire and Trapp, 1998.
    """
    values: dict[str, float] = {}
    worked(*POINT, mark=lambda v, n: values.setdefault(n, v), np=np)
    step = values[name] + 1e-30j
    there = worked(*POINT, mark=lambda v, n: step if n == name else v, np=np)
    return float(values[name]), float(there.imag / 1e-30)


def stopped() -> float:
    """Return how far gradients with `stop_gradient` are from those with a copy held fixed.

    At each inner value in turn, the edge is left out. NumPy's copy of the value is a constant.
    """
    apart = 0.0
    for name in INNER:
        fixed = cut(name)[0]
        gone = lambda *a, name=name: worked(
            *a, mark=lambda v, n: jax.lax.stop_gradient(v) if n == name else v
        )
        held = lambda *a, name=name, fixed=fixed: worked(
            *a, mark=lambda v, n: jnp.float64(fixed) if n == name else v
        )
        ours = xform.grad(gone, (0, 1, 2))(*POINT)
        theirs = jax.grad(held, (0, 1, 2))(*POINT)
        apart = max(apart, *(abs(float(a - b)) for a, b in zip(ours, theirs, strict=True)))
    return apart


def branch(depth: int, of_parameter: bool) -> tuple[int, int]:
    """Return the FLOPs of the backward pass, and the saved bytes, of a loss with a deep branch.

    The branch reads the data, or the data times a parameter.
    """
    ws = [np.asarray(normal(WIDTH, WIDTH, seed=i)) for i in range(depth)]

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x * w if of_parameter else x
        for fixed in ws:
            h = jnp.tanh(h @ fixed)
        return jnp.sum((h * w) ** 2)

    args = jnp.ones(WIDTH), normal(ROWS, WIDTH)
    both = program_flops(xform.value_and_grad(loss, policy=KEEP), *args)
    saved = xform.plan(loss, *args, policy=KEEP, verify=False).saved_bytes
    return both - program_flops(loss, *args), saved


def measure(quick: bool) -> Finding:
    """Measure the worked function in float64, and branches of several depths."""
    with jax.enable_x64():
        graph = xform.adjoints.graph(worked, *POINT)
        gradient = [float(graph.values[i].adjoint) for i in range(3)]  # pyright: ignore
        ours = {name: float(graph[name].adjoint) for name in INNER}  # pyright: ignore
        apart = stopped()
    theirs = {name: cut(name)[1] for name in INNER}
    off = {n: abs(ours[n] - theirs[n]) / abs(theirs[n]) for n in INNER}
    others = max(v for n, v in off.items() if n != "product")
    digits = [float(f"{v:.6g}") for v in gradient]
    data, parameter = ([branch(d, of) for d in DEPTHS] for of in (False, True))
    flat = all(row == data[0] for row in data)
    grows = [exponent(DEPTHS, [row[i] for row in parameter]) for i in range(2)]
    return Finding(
        [
            Claim(
                "f(x, y, z) = sin(cosh(y² + x/z) + tanh(xyz)) / log(1 + eˣ) at (3.3, 1.1, 2.3) has"
                f" the gradient {PUBLISHED}",
                "lecture notes on back-propagation",
                f"{PUBLISHED}, to six digits",
                f"({', '.join(f'{v:.6g}' for v in gradient)})",
                verdict(digits == list(PUBLISHED), f"wrong: it is ({', '.join(map(str, digits))})"),
            ),
            Claim(
                "The derivative at an inner value is that of the graph with the edges into the"
                " value cut",
                "lecture notes on back-propagation",
                "the value becomes an input; complex steps of that function, in NumPy; below tanh"
                " at 8.3, 1 - tanh² keeps 9 of 16 digits",
                f"adjoints of {len(INNER)} inner values, relative: {others:.0e} apart at most, and"
                f" {off['product']:.0e} below tanh",
                verdict(others < 1e-12 and off["product"] < 1e-9, "wrong"),
            ),
            Claim(
                "stop_gradient is an edge left out of the graph, or a copy of the value that is"
                " held fixed",
                "lecture notes; JAX's documentation",
                "the gradients by x, y and z are equal, with either of them at each inner value",
                f"{3 * len(INNER)} derivatives differ by {apart:.0e} at most",
                verdict(apart < 1e-12, "wrong"),
            ),
            Claim(
                "Values that depend on no parameter cost nothing in the backward pass",
                "lecture notes; Griewank and Walther, Evaluating Derivatives, section 6.2",
                "FLOPs of the backward pass and saved bytes do not grow with the depth of a branch"
                " of the data alone; its last value is saved, as the factor of a parameter",
                f"{DEPTHS[0]} to {DEPTHS[-1]} layers of the data: {data[0][0]:,} to"
                f" {data[-1][0]:,} FLOPs, {data[0][1]:,} to {data[-1][1]:,} bytes; of a parameter:"
                f" {parameter[-1][0]:,} FLOPs, {parameter[-1][1]:,} bytes, exponents"
                f" {grows[0]:.2f} and {grows[1]:.2f}",
                verdict(flat and min(grows) > 0.5, "wrong: they grow with the branch"),
            ),
        ],
        lambda figure: draw(figure, ours, theirs, data, parameter),
    )


def draw(figure: Figure, ours: Any, theirs: Any, data: Any, parameter: Any) -> None:
    """Draw the adjoints of inner values, and the cost of both branches."""
    left, right = figure.subplots(1, 2)
    left.plot([abs(v) for v in ours.values()], [*ours], "o", label="adjoint in the graph")
    left.plot([abs(v) for v in theirs.values()], [*theirs], "kx", label="edges cut, complex step")
    left.set(xscale="log", xlabel="derivative at an inner value, magnitude")
    left.legend(frameon=False, fontsize=8)
    for name, rows, style in (("data", data, "s--"), ("parameter", parameter, "o-")):
        for i, what in enumerate(("backward FLOPs", "saved bytes")):
            right.loglog(DEPTHS, [row[i] for row in rows], style, color=f"C{i}",
                         label=f"{what}, branch of the {name}")  # fmt: skip
    right.set(xlabel="layers of the branch")
    right.legend(frameon=False, fontsize=7)
