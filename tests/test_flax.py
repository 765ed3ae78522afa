"""`xform.flax` against `flax.nnx`: values, gradients, state updates and structure."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xform
from tests.nnx import GRAPH, MODES, TREE, Mlp, Plain, Tied, X, compare, loss, same

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def no_jax_ad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make JAX's own transforms raise."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("JAX's automatic differentiation was entered")

    for name in ("vjp", "grad", "value_and_grad", "jvp", "linearize"):
        monkeypatch.setattr(jax, name, refuse)


BUILDS = {
    "mlp": lambda: (Mlp(norm=False), X),
    "batch_norm": lambda: (Mlp(), X),
    "dropout": lambda: (Mlp(dropout=0.5), X),
    "tied": lambda: (Tied(), X),
    "plain": lambda: (Plain(), X),
}


@pytest.mark.parametrize("name", ["mlp", "dropout", "tied"])  # the others are compared below
def test_equals_nnx(name: str) -> None:
    compare("value_and_grad", loss, BUILDS[name])


@MODES
def test_modes(modes: dict[str, Any]) -> None:
    pair = lambda m, x: (loss(m, x), {"twice": 2 * x, "count": m.calls[...]})
    compare("grad", loss, BUILDS["plain"], **modes)
    compare("value_and_grad", pair, BUILDS["plain"], has_aux=True, **modes)
    compare("grad", pair, BUILDS["plain"], has_aux=True, **modes)


@MODES
def test_random_counters_advance(modes: dict[str, Any]) -> None:
    ours, theirs = Mlp(norm=False, dropout=0.5), Mlp(norm=False, dropout=0.5)
    for _ in range(3):
        same(
            xform.flax.grad(loss, allow_int=True, **modes)(ours, X),
            nnx.grad(loss, allow_int=True, **modes)(theirs, X),
        )
    assert int(ours.dropout.rngs.count[...]) == 3
    same(nnx.state(ours), nnx.state(theirs))
    chex.assert_trees_all_close(ours(X), theirs(X), rtol=1e-5)


@pytest.mark.parametrize("argnums", [(0,), (1, 0), [0, 2], -1])
def test_argnums(argnums: Any) -> None:
    def f(model: Mlp, x: jax.Array, parts: dict[str, Any]) -> jax.Array:
        return loss(model, x) * parts["scale"] + jnp.sum(parts["bias"][...] ** 2)

    build = lambda: (Mlp(), X, {"scale": jnp.float32(2), "bias": nnx.Param(jnp.ones(2))})
    ours = xform.flax.grad(f, argnums)(*build())
    theirs = nnx.grad(f, argnums=2 if argnums == -1 else argnums)(*build())  # not negative
    same(ours, theirs)


def test_arguments_that_are_no_modules() -> None:
    f = lambda a, b, flag: a["x"] ** 2 * b if flag else b
    actual = xform.flax.value_and_grad(f, (0, 1))({"x": 3.0}, jnp.float32(2), True)
    same(actual, xform.value_and_grad(f, (0, 1))({"x": 3.0}, jnp.float32(2), True))
    state = nnx.state(Mlp(), nnx.Param)
    norm = lambda state: sum(jnp.sum(x**2) for x in jax.tree.leaves(state))
    same(xform.flax.grad(norm)(state), nnx.grad(norm)(state))


def test_keywords_and_defaults() -> None:
    def f(model: Mlp, x: jax.Array = X, *, scale: float = 1.0) -> jax.Array:
        return loss(model, x) * scale

    model = Mlp(norm=False)
    expected = nnx.grad(loss)(model, X)
    same(xform.flax.grad(f)(model=model, x=X), expected)
    doubled = xform.flax.grad(f)(model, scale=2.0)
    same(doubled, jax.tree.map(lambda g: 2 * g, expected))
    same(xform.flax.grad(functools.partial(f, x=X))(model), expected)
    same(xform.flax.grad(f, 1)(model), nnx.grad(loss, argnums=1)(model, X))


def test_shared_between_arguments() -> None:
    def build() -> Any:
        first, second = Mlp(norm=False), Mlp(norm=False, seed=1)
        second.enter = first.enter
        return first, second

    f = lambda a, b: loss(a, X) + 2 * loss(b, X)
    compare("grad", f, build, argnums=(0, 1))
    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        xform.flax.grad(f)(*build())
    a, b = xform.flax.grad(f, (1, 0), allow_int=True, **GRAPH)(*build())
    assert a.enter is b.enter
    with pytest.raises(ValueError, match="graph=True"):
        xform.flax.grad(f, (0, 1), **TREE)(*build())


def test_tied_weights_have_one_gradient() -> None:
    g = xform.flax.grad(loss)(Tied(), X)
    assert len(jax.tree.leaves(g)) == 2
    with pytest.raises(ValueError, match="graph=True"):
        xform.flax.grad(loss, **TREE)(Tied(), X)


FILTERS = [
    nnx.PathContains("kernel"),
    nnx.All(nnx.Param, nnx.PathContains("leave")),
    nnx.Any(nnx.Param, nnx.BatchStat),
    nnx.BatchStat,
]


@pytest.mark.parametrize("chosen", FILTERS, ids=range(len(FILTERS)))
def test_filters(chosen: Any) -> None:
    compare("value_and_grad", loss, BUILDS["batch_norm"], argnums=nnx.DiffState(0, chosen))
    both = (nnx.DiffState(0, chosen), 1)
    compare("grad", loss, BUILDS["batch_norm"], argnums=both)


def test_auxiliary_output() -> None:
    def f(model: Mlp, x: jax.Array) -> Any:
        y = model(x)
        return jnp.mean(y), {"y": y, "model": model, "new": nnx.Param(y[0]), "name": "a string"}

    model = Mlp()
    (_, aux), _ = xform.flax.value_and_grad(f, has_aux=True)(model, X)
    assert aux["model"] is model
    assert aux["name"] == "a string"
    assert isinstance(aux["new"], nnx.Param)
    numeric = lambda model, x: (loss(model, x), model(x))
    compare("value_and_grad", numeric, BUILDS["batch_norm"], has_aux=True)
    compare("grad", numeric, BUILDS["batch_norm"], has_aux=True)


def test_structure_propagates() -> None:
    class Sower(Plain):
        def __call__(self, x: jax.Array) -> jax.Array:
            y = super().__call__(x)
            self.hidden = nnx.Intermediate(y)
            return y

    model, other = Sower(), Sower()
    xform.flax.grad(loss)(model, X)
    nnx.grad(loss)(other, X)
    same(nnx.state(model), nnx.state(other))
    assert nnx.pop(model, nnx.Intermediate)
    xform.flax.grad(loss, **GRAPH)(model, X)
    assert not nnx.pop(model, nnx.Intermediate)
    assert float(model.calls[...]) == 2


@MODES
def test_under_jit(modes: dict[str, Any]) -> None:
    def step(door: Callable[..., Any], model: Mlp, x: jax.Array) -> Any:
        return door(loss, allow_int=True, **modes)(model, x)

    def ours_step(model: Mlp, x: jax.Array) -> Any:
        return step(xform.flax.value_and_grad, model, x)

    chex.clear_trace_counter()
    ours, theirs = Mlp(norm=False, dropout=0.5), Mlp(norm=False, dropout=0.5)
    jitted = nnx.jit(chex.assert_max_traces(ours_step, 1))
    for _ in range(3):
        same(jitted(ours, X), step(nnx.value_and_grad, theirs, X))
        same(nnx.state(ours), nnx.state(theirs))


def test_under_jit_of_split_state() -> None:
    graphdef, state = nnx.split(Mlp())

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        return xform.flax.value_and_grad(loss)(model, x), nnx.state(model)

    model = Mlp()
    for _ in range(2):
        out, state = step(state, X)
        same(out, nnx.value_and_grad(loss)(model, X))
        same(state, nnx.state(model))


def test_trains_with_an_optimizer() -> None:
    optax = pytest.importorskip("optax")
    model = Mlp()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Mlp, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        value, grads = xform.flax.value_and_grad(loss)(model, x)
        optimizer.update(model, grads)
        return value

    values = [float(step(model, optimizer, X)) for _ in range(10)]
    assert values[-1] < 0.9 * values[0]


def test_composes() -> None:
    def norm(door: Any) -> Callable[..., Any]:
        return lambda m, x: sum(jnp.sum(g**2) for g in jax.tree.leaves(door(loss)(m, x)))

    ours, theirs = Plain(), Plain()
    twice = [nnx.jit(door(norm(door))) for door in (xform.flax.grad, nnx.grad)]
    same(twice[0](ours, X), twice[1](theirs, X))
    same(nnx.state(ours), nnx.state(theirs))
    batch = jnp.stack([X, 2 * X])
    mapped = [
        nnx.jit(nnx.vmap(door(loss), in_axes=(None, 0)))(Mlp(norm=False), batch)
        for door in (xform.flax.grad, nnx.grad)
    ]
    same(*mapped)


@pytest.mark.parametrize("modes", [GRAPH, TREE], ids=["graph", "tree"])
def test_vjp(modes: dict[str, Any]) -> None:
    ours, theirs = Mlp(dropout=0.5), Mlp(dropout=0.5)
    f = lambda model, x: (model(x), {"x": x})
    for _ in range(2):
        y, pull, aux = xform.flax.vjp(f, ours, X, has_aux=True, **modes)
        expected_y, expected_pull, expected_aux = nnx.vjp(f, theirs, X, has_aux=True, **modes)
        same((y, aux), (expected_y, expected_aux))
        same(pull(y), expected_pull(expected_y))
        same(nnx.state(ours), nnx.state(theirs))
    y, pull = jax.jit(lambda x: xform.flax.vjp(Plain.__call__, Plain(), x, **modes))(X)
    same(pull(y), nnx.vjp(Plain.__call__, Plain(), X, **modes)[1](y))
    waiting = xform.flax.vjp(**modes)(Plain.__call__)
    same(waiting(Plain(), X)[1](y), pull(y))


@pytest.mark.parametrize("modes", [GRAPH, TREE], ids=["graph", "tree"])
def test_jvp(modes: dict[str, Any]) -> None:
    ours, theirs = Mlp(dropout=0.5), Mlp(dropout=0.5)
    zero = lambda x: (
        jnp.ones_like(x)
        if jnp.issubdtype(x.dtype, jnp.inexact)
        else np.zeros(x.shape, jax.dtypes.float0)
    )
    f = lambda model, x: (model(x), x[0])
    for _ in range(2):
        tangents = (jax.tree.map(zero, ours), jnp.cos(X))
        actual = xform.flax.jvp(f, (ours, X), tangents, has_aux=True, **modes)
        expected = nnx.jvp(f, (theirs, X), tangents, has_aux=True, **modes)
        same(actual, expected)
        same(nnx.state(ours), nnx.state(theirs))
    waiting = xform.flax.jvp(Plain.__call__, **modes)
    primals, tangents = (Plain(), X), (Plain(), X)
    same(waiting(primals, tangents), nnx.jvp(Plain.__call__, (Plain(), X), tangents, **modes))


def test_output_with_modules() -> None:
    def f(model: Mlp, x: jax.Array) -> Any:
        return {"p": nnx.Param(model(x)), "x": x}

    model = Mlp(norm=False)
    y, pull = xform.flax.vjp(f, model, X)
    assert isinstance(y["p"], nnx.Param)
    d_model, _ = pull(y)
    assert isinstance(d_model, Mlp)


def test_custom_vjp_of_nnx() -> None:
    @nnx.custom_vjp
    def f(m: Plain, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(m.w[...]) * x)

    def bwd(res: Any, g: Any) -> Any:
        m, _ = res
        d_m = jax.tree.map(lambda x: x, g[0][0])
        d_m["w"][...] = 3 * jnp.cos(m.w[...]) * g[1]
        return d_m, jnp.sin(m.w[...]) * g[1]

    f.defvjp(lambda m, x: (f(m, x), (m, x)), bwd)
    model, x = Plain(), jnp.ones(3)
    same(xform.flax.grad(f)(model, x), nnx.grad(f)(Plain(), x))


@pytest.mark.usefixtures("no_jax_ad")
@MODES
def test_jax_is_not_entered(modes: dict[str, Any]) -> None:
    model = Mlp(dropout=0.5)
    with pytest.raises(AssertionError, match="entered"):
        nnx.grad(loss)(model, X)
    run = xform.flax.remat(loss, **modes)
    xform.flax.grad(run, allow_int=True, **modes)(model, X)
    xform.flax.value_and_grad(loss, policy=xform.policies.save_nothing)(model, X)
    flags = {**modes, "graph_updates": False}
    y, pull = xform.flax.vjp(run, model, X, **flags)
    pull(y)
    xform.flax.jvp(run, (Plain(), X), (Plain(), X), **flags)
    assert int(model.dropout.rngs.count[...]) == 3
