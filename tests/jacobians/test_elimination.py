"""Vertex elimination: JAX's values, and never more multiplications than the better pure mode."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from experiments.jacobians.problems import PROBLEMS
from tests.reference import close
from xform.errors import WrongArgument
from xform.jacobians.elimination import (
    ScalarGraph,
    cheapest_elimination,
    eliminate,
    eliminate_by_markowitz,
    eliminate_forward,
    eliminate_in_reverse,
)
from xform.jacobians.scalars import scalar_graph_of

pytestmark = pytest.mark.usefixtures("x64", "quick_compilation")
X = np.linspace(0.2, 0.9, 4)


def jacobian_by_paths(graph: ScalarGraph, values: list[float]) -> Any:
    """Return the sum over all paths of the products of their edges."""
    total = {v: {v: 1.0} for v in graph.inputs}  # by vertex and input
    for (a, b), value in sorted(zip(graph.edges, values, strict=True), key=lambda e: e[0][1]):
        for x, d in total.get(a, {}).items():
            total.setdefault(b, {})[x] = total.get(b, {}).get(x, 0.0) + d * value
    return [[total.get(y, {}).get(x, 0.0) for x in graph.inputs] for y in graph.outputs]


def any_graph(draw: random.Random) -> tuple[ScalarGraph, list[float]]:
    inside = draw.randint(0, 12)
    inputs, outputs = range(3), range(3 + inside, 5 + inside)
    edges = [(a, b) for b in range(3, 5 + inside) for a in range(min(b, 3 + inside))
             if draw.random() < 0.35]  # fmt: skip
    values = [draw.choice([1.0, -1.0, draw.uniform(-2, 2)]) for _ in edges]
    unit = tuple(abs(v) == 1 for v in values)
    return ScalarGraph(tuple(edges), unit, tuple(inputs), tuple(outputs)), values


def test_every_order_gives_the_jacobian() -> None:
    draw = random.Random(0)
    for _ in range(200):
        graph, values = any_graph(draw)
        shuffled = draw.sample(graph.inner_vertices, len(graph.inner_vertices))
        orders = [
            eliminate_forward(graph),
            eliminate_in_reverse(graph),
            eliminate_by_markowitz(graph),
            eliminate(graph, "", shuffled),
        ]
        for order in orders:
            found, counted = [*values, *[0.0] * (order.slots - len(values))], 0
            for level in order.levels:
                added = [(to, found[a] * found[b]) for to, a, b in level]
                for to, product in added:
                    found[to] += product
                counted += len(level)
            assert order.multiplications <= counted
            got = [[found[order.remaining[x, y]] if (x, y) in order.remaining else 0.0
                    for x in graph.inputs] for y in graph.outputs]  # fmt: skip
            np.testing.assert_allclose(got, jacobian_by_paths(graph, values), atol=1e-9)
        least = min(o.multiplications for o in orders[:2])
        assert cheapest_elimination(graph).multiplications <= least


@pytest.mark.parametrize("name", ["Helmholtz, of a mixture", "perceptron", "Brown, almost linear"])
def test_standard_problems(name: str) -> None:
    f, point = PROBLEMS[name]
    x = jnp.array(point)
    close(jax.jit(xform.jacobian(f, elimination="markowitz"))(x), jax.jacobian(f)(x))
    graph = scalar_graph_of(f, x)
    pure = min(
        eliminate_forward(graph).multiplications, eliminate_in_reverse(graph).multiplications
    )
    assert cheapest_elimination(graph).multiplications <= pure


CASES = {
    "tree": lambda x: {"a": (x * x, jnp.float32(1.0)), "b": x.sum() * x[::-1].reshape(2, 2)},
    "loop": lambda x: lax.scan(lambda h, _: (jnp.sin(h) * x[0], h[1]), x, None, length=3),
    "gather": lambda x: x[jnp.array([3, 0, 0])] ** 2,
    "branch": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x) * x[1],
    "identity": lambda x: x,
    "constant": lambda x: jnp.ones(2),
    "empty": lambda x: x[:0],
    "read twice": lambda x: x * x + x,
    "softmax": jax.nn.softmax,
    "sorted": lambda x: jnp.sort(x) * jnp.max(x),
    "relu": lambda x: jax.nn.relu(x - 0.5),
    "product of matrices": lambda x: x.reshape(2, 2) @ jnp.sin(x.reshape(2, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_jaxs(name: str) -> None:
    f = CASES[name]
    ours = xform.jacobian(f, elimination="markowitz")
    got, want = jax.jit(lambda x: (ours(x), jax.jacobian(f)(x)))(X)
    close(got, want)


def test_scalars_batches_and_derivatives() -> None:
    f = lambda x: jnp.stack([jnp.sin(x[0]) * x[1], x[2] / x[3]])
    ours = xform.jacobian(f, elimination="markowitz")
    xs = np.stack([X, X**2])
    close(jax.vmap(ours)(xs), jax.vmap(jax.jacobian(f))(xs))
    close(
        xform.jacobian(lambda x: x**3, elimination="markowitz")(2.0),
        jax.jacobian(lambda x: x**3)(2.0),
    )
    total = lambda j: lambda x: jnp.sum(j(x) ** 2)
    close(jax.jit(xform.grad(total(ours)))(X), jax.grad(total(jax.jacobian(f)))(X))


def test_invalid_options_and_programs_beyond_elimination_raise() -> None:
    for wrong in ({"elimination": "minimal"}, {"elimination": "markowitz", "chunk": 2},
                  {"elimination": "markowitz", "mode": "forward"}):  # fmt: skip
        with pytest.raises(WrongArgument):
            xform.jacobian(jnp.sin, **wrong)
    asked = {"elimination": "markowitz"}
    with pytest.raises(WrongArgument, match="uses values in Python"):
        xform.jacobian(lambda x: x if x[0] > 0 else -x, **asked)(X)
    with pytest.raises(WrongArgument, match="two derivatives"):
        xform.jacobian(lambda x: jnp.abs(x * 1j), **asked)(X)
    with pytest.raises(WrongArgument, match="scalar derivatives"):
        xform.jacobian(lambda x: jnp.cumsum(x), **asked)(np.ones(400))
