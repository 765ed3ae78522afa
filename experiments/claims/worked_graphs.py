"""Adjoints on three small graphs: pulled, pushed, and as published."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import xform
from experiments.claims.claim import Claim, Finding, verdict
from xform.adjoints.computational_graph import ComputationalGraph
from xform.adjoints.parts import AdjointUpdate


@dataclasses.dataclass(frozen=True)
class Worked:
    """A function, a point, the published gradient there, and its number of printed digits."""

    function: Callable[..., Any]
    point: tuple[float, ...]
    gradient: tuple[float, ...]
    digits: int


def first(x1: Any, x2: Any) -> Any:
    """Griewank and Walther, section 1.3, first example."""
    v = x1 / x2
    e = jnp.exp(x2)
    return (jnp.sin(v) + v - e) * (v - e)


def second(x1: Any, x2: Any) -> Any:
    """Baydin et al., arXiv:1502.05767, figure 4."""
    return jnp.log(x1) + x1 * x2 - jnp.sin(x2)


def third(x: Any, y: Any, z: Any) -> Any:
    """A quotient that is read twice."""
    q = x / y
    return q - jnp.exp(q) * (x - z)


E3 = float(np.exp(3.0))
GRAPHS = {
    "(sin(a/b) + a/b - exp b)(a/b - exp b) at (1.5, 0.5)": Worked(
        first, (1.5, 0.5), (3.0118, -13.7239), 4
    ),
    "ln a + a b - sin b at (2, 5)": Worked(second, (2.0, 5.0), (5.5, 1.716), 3),
    "a/b - exp(a/b)(a - c) at (3.3, 1.1, 2.3)": Worked(
        third, (3.3, 1.1, 2.3), ((1 - E3) / 1.1 - E3, -3 * (1 - E3) / 1.1, E3), 12
    ),
}


def adjoints(graph: ComputationalGraph, steps: tuple[AdjointUpdate, ...]) -> dict[int, float]:
    """Return the adjoint of each value after the last step."""
    return {graph.edges[s.edge].source: float(s.total) for s in steps}


def ordered(graph: ComputationalGraph, steps: tuple[AdjointUpdate, ...]) -> bool:
    """Return whether each edge is used only after all edges that leave its operation's result."""
    done = set[int]()
    for step in steps:
        made = graph.operations[graph.edges[step.edge].target].outputs
        needed = {e.id for e in graph.edges if e.source in made and e.flow is not None}
        if not needed <= done:
            return False
        done.add(step.edge)
    return True


def shared(quick: bool) -> float:
    """Return the error of the gradient of a shared weight: it is the sum of its uses' gradients."""
    depth, width = 3 if quick else 8, 16
    w = jax.random.normal(jax.random.key(0), (width, width)) / width**0.5
    x = jax.random.normal(jax.random.key(1), (4, width))

    def loss(ws: list[jax.Array]) -> jax.Array:
        h = x
        for w in ws:
            h = jnp.tanh(h @ w)
        return jnp.sum(h**2)

    together = xform.grad(lambda w: loss([w] * depth))(w)
    each = xform.grad(loss)([w] * depth)
    return float(jnp.max(jnp.abs(together - sum(each))))


def measure(quick: bool) -> Finding:
    """Measure both orders of accumulation on each graph, in float64."""
    with jax.enable_x64():
        graphs = {name: xform.adjoints.graph(of.function, *of.point) for name, of in GRAPHS.items()}
        apart = shared(quick)
    pulled = {name: adjoints(g, g.pulled) for name, g in graphs.items()}
    pushed = {name: adjoints(g, g.pushed) for name, g in graphs.items()}
    between = max(abs(v - pushed[n][i]) for n, by in pulled.items() for i, v in by.items())
    same = [n for n in graphs if pulled[n].keys() == pushed[n].keys()]
    once = [n for n, g in graphs.items() if ordered(g, g.pulled) and ordered(g, g.pushed)]
    found = {n: [pulled[n][i] for i in range(len(of.point))] for n, of in GRAPHS.items()}
    equal = [n for n, of in GRAPHS.items()
             if np.allclose(found[n], of.gradient, rtol=0, atol=10.0**-of.digits)]  # fmt: skip
    every = len(graphs)
    said = "; ".join(f"({', '.join(f'{v:.4f}' for v in values)})" for values in found.values())
    return Finding(
        [
            Claim(
                "Adjoints pulled from out-edges equal adjoints pushed to in-edges",
                "lecture notes on back-propagation",
                "the same products in another order of sums: equal to rounding",
                f"{sum(map(len, pulled.values()))} adjoints of {every} graphs differ by"
                f" {between:.0e} at most",
                verdict(between < 1e-12 and len(same) == every, "wrong"),
            ),
            Claim(
                "Values are visited in reverse topological order, each edge once",
                "Griewank and Walther, Evaluating Derivatives, section 3.2",
                "an edge is taken when all that leave its operation's result were",
                f"so in both orders on {len(once)} of {every} graphs",
                verdict(len(once) == every, "wrong"),
            ),
            Claim(
                "The partial derivatives of three worked graphs are those that are published",
                "Griewank and Walther, tables 1.3 and 1.4; Baydin et al., arXiv:1502.05767, table"
                " 3; a quotient read twice, at (3.3, 1.1, 2.3), by its formula",
                "; ".join(str(tuple(round(v, 4) for v in of.gradient)) for of in GRAPHS.values())
                + ", to a unit of the last digit: tables are of rounded numbers",
                said,
                verdict(len(equal) == every, f"holds for {len(equal)} of {every}"),
            ),
            Claim(
                "The gradients of a shared parameter add up",
                "lecture notes on back-propagation",
                "the gradient is the sum of those of its uses",
                f"the largest difference is {apart:.0e}",
                verdict(apart < 1e-12, "wrong"),
            ),
        ],
        lambda figure: draw(figure, graphs),
    )


def draw(figure: Figure, graphs: dict[str, ComputationalGraph]) -> None:
    """Draw how the adjoints of the inputs grow, edge by edge, in both orders."""
    panels = figure.subplots(1, len(graphs))
    for axes, (name, graph) in zip(panels, graphs.items(), strict=True):
        for way, steps in (("pushed", graph.pushed), ("pulled", graph.pulled)):
            for value in graph.values:
                by = [(i, float(s.total)) for i, s in enumerate(steps, 1)
                      if graph.edges[s.edge].source == value.id]  # fmt: skip
                if value.label and by:
                    axes.plot(*zip(*by, strict=True), "o-" if way == "pushed" else "s--",
                              label=f"{value.label}, {way}", markerfacecolor="none")  # fmt: skip
        axes.set_title(name, fontsize=7)
        axes.set_xlabel("edges taken")
        axes.legend(frameon=False, fontsize=7)
    panels[0].set_ylabel("adjoint so far")
