"""A cut saves the cheapest of all possible sets, compared by trying all of them."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform
from xform._jax import Var
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import analyze
from xform.planner.costs.recompute import price
from xform.planner.cuts.graph import CutGraph
from xform.planner.decide import schedule
from xform.program.ir import trace

X, W = jax.ShapeDtypeStruct((4, 6), np.float32), jax.ShapeDtypeStruct((6, 6), np.float32)

FUNCTIONS = {
    "chain": lambda x, w: jnp.sin(jnp.exp(jnp.tanh(x @ w))),
    "dots": lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w) * x,
    "mask": lambda x, w: jnp.where(x @ w > 0, 2.0 * x, x) * jnp.exp(x),
    "short floats": lambda x, w: jnp.sin((x @ w).astype(jnp.bfloat16)).astype(np.float32),
    "softmax": lambda x, w: jax.nn.softmax(x @ w) @ w,
    "norm": lambda x, w: (x - x.mean(1, keepdims=True)) * lax.rsqrt(jnp.square(x).mean(1))[:, None],
    "outer": lambda x, w: jnp.sin(x[:, :1] * x[:1, :]) @ w,
    "name": lambda x, w: jnp.sin(checkpoint_name(jnp.sin(x @ w), "a")),
    "cumsum": lambda x, w: jnp.sin(jnp.cumsum(jnp.sin(x))) * x.sum(),
}


def joint_of(f):
    prog = trace(lambda *xs: [f(*xs)], X, W)
    return analyze(prog, (True, True))


def cost_of(joint, saved, price) -> float:
    """Return bytes and work of a saved set; infinite if a forbidden equation is recomputed."""
    wanted = [v for e in joint.backward for v in e.invars]
    todo = [v for v in wanted if isinstance(v, Var) and v in joint.producer]
    done, again, total = set(), set(), 0.0
    while todo:
        v = todo.pop()
        if v in done:
            continue
        done.add(v)
        if v in saved:
            total += aval_bytes(v.aval)
            continue
        eqn = joint.producer[v]
        total += 0 if id(eqn) in again else price(eqn)
        again.add(id(eqn))
        todo += [u for u in eqn.invars if isinstance(u, Var) and u in joint.producer]
    return total


# The price of a FLOP: infinite by default; a product here has 12 FLOPs for each of its elements.
PRICES = {"no work": math.inf, "dear": 0.6, "cheap": 0.1, "free": 0.0}


@pytest.mark.parametrize("flop", PRICES.values(), ids=PRICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_saved_set_is_cheaper(name: str, flop: float) -> None:
    of = functools.partial(price, flop_price=flop)
    joint = joint_of(FUNCTIONS[name])
    graph = CutGraph(joint, {})
    chosen = graph.cheapest([of(e) for e in graph.equations], dict.fromkeys(joint.inputs, 0.0))
    candidates = [
        v
        for e in joint.forward
        for v in e.outvars
        if v not in joint.always_recomputed and e.primitive.name != "name"
    ]
    assert len(candidates) <= 14
    sets = itertools.chain.from_iterable(
        itertools.combinations(candidates, n) for n in range(len(candidates) + 1)
    )
    best = min(cost_of(joint, set(s), of) for s in sets)
    found = cost_of(joint, chosen, of)
    assert found < math.inf
    assert found <= best * (1 + 1e-6)


@pytest.mark.parametrize("name", ["name", "mask"])
def test_a_low_price_does_not_save_what_must_not_be_saved(name: str) -> None:
    """Named values and constants are never saved."""
    graph = CutGraph(joint := joint_of(FUNCTIONS[name]), {})
    results = [(e, v) for e in graph.equations for v in e.outvars]
    forbidden = {
        v for e, v in results if v in joint.always_recomputed or e.primitive.name == "name"
    }
    assert forbidden
    free = {**dict.fromkeys(joint.inputs, 100.0), **dict.fromkeys(forbidden, 0.0)}
    assert forbidden.isdisjoint(graph.cheapest([1.0] * len(graph.equations), free))


def again(f, *args, active=(True, True)) -> set[str]:
    """Return the recomputed primitives."""
    how = schedule(
        analyze(trace(lambda *xs: [f(*xs)], *args), active), xform.policies.min_cut, "cpu"
    )
    return {e.primitive.name for e in how.order if id(e) in how.recomputed}


def test_products_are_saved_and_fusible_operations_recomputed() -> None:
    def f(x, w):
        return jnp.sum(jnp.sin(jnp.exp(jnp.tanh(x @ w)) + 1.0) @ w)

    kept = xform.residuals(f, X, W)
    assert kept.total_bytes == 4 * 4 * 6
    assert "dot_general" not in again(f, X, W)
    assert again(f, X, W)


def test_a_mask_is_less_than_a_float() -> None:
    def f(x, w):
        return jnp.sum(jnp.where(x @ w > 0, 3.0 * x, x))

    (row,) = [r for r in xform.residuals(f, X, W) if r.kind == "kept"]
    assert row.dtype == "bool"


def test_random_numbers_are_kept() -> None:
    def f(x, key):
        return jnp.sum(jnp.sin(x * jax.random.bernoulli(key, 0.5, x.shape)))

    key = jax.eval_shape(lambda: jax.random.key(0))
    rows = [r for r in xform.residuals(f, X, key) if r.kind == "kept"]
    assert rows
    assert not {name for name in again(f, X, key, active=(True, False)) if "random" in name}


def test_sharding_constraints_are_not_recomputed() -> None:
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))

    def f(x, w):
        return jnp.sum(jnp.sin(lax.with_sharding_constraint(jnp.sin(x @ w), split)))

    assert "sharding_constraint" not in again(f, X, W)


@pytest.mark.parametrize("policy", [None, xform.policies.min_cut])
def test_gradients_are_the_same(policy) -> None:
    with jax.enable_x64(True):
        x, w = np.sin(np.arange(24.0)).reshape(4, 6), np.cos(np.arange(36.0)).reshape(6, 6)
        for f in FUNCTIONS.values():
            loss = lambda x, w: jnp.sum(f(x, w).astype(float) ** 2)  # noqa: B023
            ours = jax.jit(xform.grad(loss, (0, 1), policy=policy))(x, w)
            same = jax.jit(jax.grad(loss, (0, 1)))(x, w)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-9), ours, same)


def test_a_cut_is_made_once_for_equal_prices_and_sizes(monkeypatch) -> None:
    joint = joint_of(FUNCTIONS["dots"])
    graph, none = CutGraph(joint, {}), dict.fromkeys(joint.inputs, 0.0)
    of = lambda flop: [price(e, flop) for e in graph.equations]
    first, dear = graph.cheapest(of(0.1), none), graph.cheapest(of(math.inf), none)
    assert first != dear
    assert [joint.forward[i] for i in graph.places] == list(graph.equations)
    monkeypatch.setattr("xform.planner.cuts.graph.minimum_cut", None)
    assert graph.cheapest(of(0.1), none) == first
    with pytest.raises(TypeError):  # sizes differ
        graph.cheapest(of(0.1), dict.fromkeys(joint.inputs, 1.0))
