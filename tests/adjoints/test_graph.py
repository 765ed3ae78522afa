"""`graph`: worked examples, JAX's gradients, and two orders of accumulation that agree."""

import functools
import json
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.reference import close
from xform.adjoints.computational_graph import ComputationalGraph
from xform.errors import NotScalar, WrongArgument, WrongDtype

pytestmark = pytest.mark.usefixtures("x64")


def partials_of(g: ComputationalGraph) -> dict[tuple[str, str], float]:
    """Return the local derivatives of a graph of scalars, by the letters of consumer and value."""
    name = lambda e: (g.values[g.operations[e.target].outputs[0]].name, g.values[e.source].name)
    return {name(e): e.partial.value for e in g.edges if e.partial and e.partial.value is not None}


def adjoints_of(g: ComputationalGraph) -> dict[str, float]:
    return {v.name: float(v.adjoint) for v in g.values if v.adjoint is not None}


def test_worked_one() -> None:
    """(x y) + sin(x) at (2, 3): three operations."""
    g = xform.adjoints.graph(lambda x, y: x * y + jnp.sin(x), 2.0, 3.0)
    cos = np.cos(2.0)
    assert [op.text for op in g.operations] == ["input", "input", "mul", "sin", "add"]
    assert partials_of(g) == pytest.approx(
        {("c", "a"): 3, ("c", "b"): 2, ("d", "a"): cos, ("e", "c"): 1, ("e", "d"): 1}
    )
    assert adjoints_of(g) == pytest.approx({"a": 3 + cos, "b": 2, "c": 1, "d": 1, "e": 1})


def test_worked_two() -> None:
    """x / y - exp(x / y) (x - z) at (3.3, 1.1, 2.3): a quotient that is read twice."""

    def f(x: Any, y: Any, z: Any) -> Any:
        q = x / y
        return q - jnp.exp(q) * (x - z)

    g = xform.adjoints.graph(f, 3.3, 1.1, 2.3)
    q, e = 3.0, np.exp(3.0)
    # a, b, c = x, y, z; d = a / b; e = exp d; f = a - c; g = e f; h = d - g
    assert partials_of(g) == pytest.approx({
        ("d", "a"): 1 / 1.1, ("d", "b"): -q / 1.1, ("e", "d"): e, ("f", "a"): 1, ("f", "c"): -1,
        ("g", "e"): 1.0, ("g", "f"): e, ("h", "d"): 1, ("h", "g"): -1,
    })  # fmt: skip
    want = {"h": 1, "g": -1, "f": -e, "e": -1.0, "d": 1 - e, "c": e}
    want |= {"a": (1 - e) / 1.1 - e, "b": -(1 - e) * q / 1.1}
    assert adjoints_of(g) == pytest.approx(want)


def test_worked_three() -> None:
    """A value that is squared, and read by a stop: t = x^2; tanh(t) stop(t) + x."""
    g = xform.adjoints.graph(lambda x: (t := x * x, jnp.tanh(t) * lax.stop_gradient(t) + x)[1], 0.5)
    t, th = 0.25, np.tanh(0.25)
    activities = {v.name: v.activity for v in g.values}
    assert activities == {"a": "active", "b": "active", "c": "active", "d": "stopped",
                          "e": "active", "f": "active"}  # fmt: skip
    assert g.operations[g["d"].operation].text == "stop_gradient"
    assert g["d"].adjoint is None
    squares = [e for e in g.edges if g.operations[e.target].text == "mul" and e.source == 0]
    assert [e.partial.value for e in squares if e.partial] == [0.5, 0.5]  # one edge for each read
    want = {"a": t * (1 - th**2) + 1, "b": t * (1 - th**2), "c": t, "e": 1, "f": 1}
    assert adjoints_of(g) == pytest.approx(want)


UNARY: list[Callable[[Any], Any]] = [
    jnp.sin,
    jnp.exp,
    jnp.tanh,
    lambda x: 1 / (2 + x * x),
    lax.stop_gradient,
]
BINARY: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x * y, lambda x, y: x + y, lambda x, y: x - 0.5 * y, lambda x, y: x / (2 + y * y),
]  # fmt: skip


def random_program(seed: int, shape: tuple[int, ...]) -> Callable[..., Any]:
    rng = random.Random(seed)
    picks = [(rng.random() < 0.4, rng.randrange(99), rng.randrange(99), rng.randrange(99))
             for _ in range(rng.randint(4, 14))]  # fmt: skip

    def f(x: Any, y: Any) -> Any:
        pool = [x, y]
        for unary, op, a, b in picks:
            u, v = pool[a % len(pool)], pool[b % len(pool)]
            pool.append(UNARY[op % 5](u) if unary else BINARY[op % 4](u, v))
        return jnp.sum(pool[-1] * pool[-2]) + jnp.sum(pool[-3])

    return f


def orders_agree(g: ComputationalGraph) -> None:
    """Check that both orders use each edge once, after all consumers, with equal final sums."""
    flows = [e.id for e in g.edges if e.flow is not None]
    assert sorted(s.edge for s in g.pushed) == sorted(s.edge for s in g.pulled) == flows
    for steps in (g.pushed, g.pulled):
        last = {g.edges[s.edge].source: s.total for s in steps}
        for source, total in last.items():
            if source != g.output:
                close(total, g.values[source].adjoint, 1e-12)
        done: set[int] = set()
        for s in steps:
            consumer = g.operations[g.edges[s.edge].target]
            for out in consumer.outputs:  # everything that flows to the consumer has arrived
                into = {e.id for e in g.edges if e.source == out and e.flow is not None}
                assert into <= done
            done.add(s.edge)
    for v in g.values:  # an adjoint is the sum over out-edges
        flows_here = [e.flow for e in g.edges if e.source == v.id and e.flow is not None]
        if flows_here and v.id != g.output:
            close(sum(flows_here[1:], flows_here[0]), v.adjoint, 1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [(), (3,)])
def test_random_graphs(seed: int, shape: tuple[int, ...]) -> None:
    f = random_program(seed, shape)
    x, y = np.full(shape, 0.7), np.linspace(0.1, 0.4, int(np.prod(shape))).reshape(shape)
    g = xform.adjoints.graph(f, x, y)
    orders_agree(g)
    want = jax.grad(f, (0, 1))(x, y)
    for name, w in zip("xy", want, strict=True):
        got = g[name].adjoint
        close(np.zeros(shape) if got is None else got, w, 1e-10)


def grown(h: Any, n: Any) -> Any:
    return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 1.1), (0, h))[1]


def everything(params: dict[str, Any], x: Any, n: Any, grown: Any = grown) -> Any:
    """A function with loops, branches, calls, remat, a rule, integers, a stop, several outputs."""
    h = jax.jit(lambda x: jnp.tanh(x @ params["w"]))(x)

    def step(h: Any, t: Any) -> Any:
        h = jnp.sin(h * t) + params["b"]
        return h, (h.sum(), h > 0)

    h, (sums, _) = lax.scan(step, h, jnp.arange(1.0, 4.0), reverse=True)
    h = lax.cond(n > 1, lambda h: h**2, lambda h: -h, h)
    h = jax.checkpoint(lambda h: jnp.exp(-h) * h)(h)
    h = grown(h, n)
    values, order = lax.top_k(jax.nn.relu(h), 2)
    q, r = jnp.linalg.qr(params["w"])
    return values.sum() + lax.stop_gradient(h).sum() * sums[1] + order.sum() + (q * r).sum()


ARGS = ({"w": np.array([[0.3, -0.2], [0.5, 0.9]]), "b": np.array([0.1, -0.3])},
        np.array([[0.2, 0.8], [-0.4, 0.6]]), np.array(3))  # fmt: skip


@functools.cache
def by_jax() -> Any:
    """Return JAX's gradient. JAX cannot reverse a while loop, so `grown` becomes a factor."""
    return jax.jit(jax.grad(lambda *a: everything(*a, 3, lambda h, _: h * 1.1**3), (0, 1)))(
        *ARGS[:2]
    )


@pytest.mark.parametrize("expand", [0, None])
def test_nested_programs_opened_and_not(expand: int | None) -> None:
    g = xform.adjoints.graph(everything, *ARGS, expand_up_to=expand)
    orders_agree(g)
    want = by_jax()
    close(g["params['w']"].adjoint, want[0]["w"], 1e-9)
    close(g["params['b']"].adjoint, want[0]["b"], 1e-9)
    close(g["x"].adjoint, want[1], 1e-9)
    assert g["n"].activity == "constant"
    assert float(g.values[g.output].array) == pytest.approx(float(everything(*ARGS)))
    closed = {op.text.partition("[")[0] for op in g.operations if op.closed}
    if expand is None:
        assert not closed - {"custom_jvp_call"}
        scopes = {s for op in g.operations for s in op.scope}
        assert {
            "scan, iteration 0",
            "scan, iteration 2",
            "branch 1",
            "while, iteration 2",
        } <= scopes
    if expand == 0:
        assert {"scan", "while", "cond", "jit"} <= closed


PUBLISHED: dict[str, Callable[[Any], Any]] = {
    "Rosenbrock": lambda x: jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2),
    "Ackley": lambda x: (
        -20 * jnp.exp(-0.2 * jnp.sqrt(jnp.mean(x**2))) - jnp.exp(jnp.mean(jnp.cos(2 * jnp.pi * x)))
    ),
    "Beale": lambda x: sum(
        (c - x[0] + x[0] * x[1] ** i) ** 2 for i, c in enumerate((1.5, 2.25, 2.625), 1)
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_test_functions(name: str) -> None:
    x = np.array([0.6, -0.4, 1.2])
    g = xform.adjoints.graph(PUBLISHED[name], x)
    orders_agree(g)
    close(g["x"].adjoint, jax.grad(PUBLISHED[name])(x), 1e-10)


def test_trips_of_a_loop_backwards() -> None:
    """In a loop that runs in reverse, the last iteration comes first."""
    g = xform.adjoints.graph(everything, *ARGS, expand_up_to=None)
    trips = [s for op in g.operations for s in op.scope if s.startswith("scan, iteration")]
    assert list(dict.fromkeys(trips)) == [f"scan, iteration {t}" for t in (2, 1, 0)]


def test_local_derivatives_of_arrays() -> None:
    """Norms of Jacobian blocks equal the norms of JAX's Jacobians; large ones are estimated."""
    w, x = np.arange(6.0).reshape(2, 3) / 5, np.array([0.5, -1.0, 2.0])
    f = lambda w, x: jnp.sum(jnp.tanh(w @ x))
    g = xform.adjoints.graph(f, w, x)
    by = {g.values[e.source].name: e.partial for e in g.edges if e.partial}
    blocks = jax.jacobian(lambda w, x: w @ x, (0, 1))(w, x)
    for name, block in zip("ab", blocks, strict=True):
        assert by[name].shape == block.shape
        assert by[name].norm == pytest.approx(np.linalg.norm(block))
        assert by[name].exact
    assert by["c"].norm == pytest.approx(np.linalg.norm(1 - np.tanh(w @ x) ** 2))
    n = 80
    edges = xform.adjoints.graph(lambda x: jnp.sum(jnp.cumsum(x) * 2.0), np.ones(n)).edges
    (edge,) = [e for e in edges
               if e.partial and e.partial.shape == (n, n) and not e.partial.exact]  # fmt: skip
    assert edge.partial
    assert edge.partial.norm == pytest.approx(np.sqrt(n * (n + 1) / 2), rel=0.5)


def test_a_value_that_does_not_reach_the_output() -> None:
    g = xform.adjoints.graph(lambda x: (xform.adjoints.name(x * 2, "lost"), x * 3)[1], 1.0)
    assert g["lost"].activity == "active"
    assert g["lost"].adjoint is None
    assert float(g["x"].adjoint) == 3.0


def test_argnums_select_adjoints_and_string_arguments_are_constants() -> None:
    f = lambda x, how, y, *, z: getattr(jnp, how)(x) * y * z
    g = xform.adjoints.graph(f, 0.5, "sin", 2.0, z=3.0, argnums=0)
    assert float(g["x"].adjoint) == pytest.approx(6 * np.cos(0.5))
    assert [v.label for v in g.values if v.activity == "active" and v.label] == ["x"]
    assert float(xform.adjoints.graph(f, 0.5, "sin", 2.0, z=3.0)["y"].adjoint) == pytest.approx(
        3 * np.sin(0.5)
    )


def test_integers_of_python_are_held() -> None:
    f = jax.jit(lambda x, n, on: sum(x**i for i in range(n)) if on else x, static_argnums=(1, 2))
    g = xform.adjoints.graph(f, 0.5, 3, True)
    assert float(g["x"].adjoint) == 2.0
    assert [v.label for v in g.values if v.label] == ["x"]


def test_an_equinox_module() -> None:
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    loss = lambda m, x: jnp.sum(jax.vmap(m)(x) ** 2)
    g = xform.adjoints.graph(loss, mlp, np.ones((4, 2)))
    want = eqx.filter_grad(loss)(mlp, np.ones((4, 2)))
    close(g["m.layers[0].weight"].adjoint, want.layers[0].weight, 1e-6)


def test_an_output_that_is_an_input_or_a_constant() -> None:
    g = xform.adjoints.graph(lambda x: x, 2.0)
    assert float(g["x"].adjoint) == 1.0
    assert g.pushed == g.pulled == ()
    g = xform.adjoints.graph(lambda x: jnp.asarray(2.0), 1.0)
    assert g["x"].adjoint is None
    json.dumps(g.to_dict(), allow_nan=False)
    assert str(g)
    assert g.to_dot().startswith("digraph {")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype: str) -> None:
    g = xform.adjoints.graph(lambda x: jnp.sum(jnp.sin(x) ** 2), jnp.ones(3, dtype))
    assert g["x"].adjoint.dtype == dtype
    np.testing.assert_allclose(np.asarray(g["x"].adjoint, float), np.sin(2.0), rtol=0.02)
    json.dumps(g.to_dict(), allow_nan=False)


def test_complex_values_have_adjoints() -> None:
    f = lambda x: jnp.sum(jnp.abs(jnp.fft.fft(x)) ** 2)
    g = xform.adjoints.graph(f, np.arange(4.0))
    close(g["x"].adjoint, jax.grad(f)(np.arange(4.0)), 1e-9)
    assert "complex" in str(g)
    orders_agree(g)


def test_keys_empty_arrays_and_numbers_that_json_has_not() -> None:
    def f(x: Any, key: Any) -> Any:
        noise = jax.random.normal(key, x.shape)
        return jnp.sum(jnp.log(x) * noise) + jnp.sum(x[:0]) + jnp.sum(x * jnp.inf)

    g = xform.adjoints.graph(f, np.array([0.0, 1.0]), jax.random.key(0))
    text = json.dumps(g.to_dict(), allow_nan=False)
    assert '"nan"' in text
    assert '"inf"' in text or '"-inf"' in text
    assert "key<fry>" in str(g)


def test_the_dict() -> None:
    d = xform.adjoints.graph(lambda x, y: jnp.sum(x * y), np.ones(3), 2.0).to_dict()
    assert json.loads(json.dumps(d, allow_nan=False)) == d
    x, *_ = d["values"]
    assert (x["name"], x["label"], x["type"], x["activity"]) == ("a", "x", "f64[3]", "active")
    assert x["norm"] == pytest.approx(np.sqrt(3))
    assert x["adjoint"] == {"shape": [3], "norm": pytest.approx(2 * np.sqrt(3))}
    assert [s["edge"] for s in d["pushed"]]
    assert d["values"][d["output"]]["value"] == 6.0
    where = [op["where"] for op in d["operations"] if op["inputs"]]
    assert all("test_graph.py:" in w for w in where)


def test_the_text_of_a_large_graph_is_short_and_says_so() -> None:
    def f(x: Any) -> Any:
        for _ in range(150):
            x = jnp.sin(x) * x
        return x

    g = xform.adjoints.graph(f, 0.5)
    assert len(str(g).splitlines()) == 203
    assert "... 101 more; text(rows=None) shows all" in str(g)
    assert len(g.text(rows=None).splitlines()) == 303
    short = g.text(rows=5, lines=True).splitlines()
    assert len(short) == 8
    assert "test_graph.py:" in short[-1]


def test_graphviz() -> None:
    text = xform.adjoints.graph(everything, *ARGS, expand_up_to=None).to_dot()
    assert text.count("{") == text.count("}")
    assert 'label="scan, iteration 0"' in text
    assert "color=darkorange" in text
    assert text.count(" -> ") > 20


def test_a_name_that_does_not_exist() -> None:
    g = xform.adjoints.graph(lambda hidden: jnp.sin(hidden), 0.5)
    with pytest.raises(WrongArgument, match="such as 'hidden'"):
        g["hiden"]


def test_array_outputs_complex_outputs_and_calls_inside_jit_raise() -> None:
    with pytest.raises(NotScalar, match="shape"):
        xform.adjoints.graph(lambda x: x, np.ones(3))
    with pytest.raises(WrongDtype, match="real"):
        xform.adjoints.graph(lambda x: x + 1j, 1.0)
    with pytest.raises(WrongArgument, match="remedy:  call graph outside jit"):
        jax.jit(lambda x: len(str(xform.adjoints.graph(jnp.sin, x))))(1.0)
