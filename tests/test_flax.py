"""`xform.flax` against `flax.nnx`: same values, gradients, state updates and structure."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import hijax

import xform
from xform.errors import NotDifferentiable, NotScalar, WrongArgument, WrongDtype, WrongTangent

X = jnp.sin(jnp.arange(12.0).reshape(4, 3))
GRAPH = {"graph": True, "graph_updates": False}
TREE = {"graph": False}
# Mutable values that know what they hold are gone in JAX 0.12.
HIJAX = pytest.mark.skipif(not hasattr(hijax, "AvalQDD"), reason="of JAX before 0.12")
MODES = pytest.mark.parametrize("modes", [{}, GRAPH, TREE], ids=["updates", "graph", "tree"])


class Mlp(nnx.Module):
    """A module with every kind of state: parameters, statistics, and random counters if asked."""

    def __init__(self, *, norm: bool = True, dropout: float = 0.0, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.enter = nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.leave = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.enter(x))
        x = x if self.norm is None else self.norm(x)
        x = x if self.dropout is None else self.dropout(x)
        return self.leave(x)


class Tied(nnx.Module):
    """One Param with two owners, and one submodule with two."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(3, 3, rngs=rngs)
        self.again = self.embed
        self.head = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
        self.head.kernel = self.embed.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.again(jnp.sin(self.embed(x)))))


class Plain(nnx.Module):
    """A module all of whose Variables are floats, so that trees of it can be differentiated."""

    def __init__(self):
        self.w = nnx.Param(jnp.arange(3.0))
        self.calls = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return jnp.tanh(x @ self.w[...]) * self.calls[...]


def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def same(actual: Any, expected: Any) -> None:
    """Equal structure, types and values; keys by their data, float0 by its shape."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)

    def data(x: Any) -> Any:
        if jax.dtypes.issubdtype(
            jnp.asarray(x).dtype if x is None else x.dtype, jax.dtypes.prng_key
        ):
            return jax.random.key_data(x)
        return np.zeros(np.shape(x), np.bool_) if x.dtype == jax.dtypes.float0 else x

    chex.assert_trees_all_close(
        jax.tree.map(data, actual), jax.tree.map(data, expected), rtol=1e-5, atol=1e-6
    )


def compare(door: str, f: Callable[..., Any], build: Callable[[], Any], **options: Any) -> Any:
    """Run `xform.flax.<door>` and `nnx.<door>` twice; compare results and state."""
    ours, theirs = build(), build()
    for _ in range(2):
        actual = getattr(xform.flax, door)(f, **options)(*ours)
        expected = getattr(nnx, door)(f, **options)(*theirs)
        same(actual, expected)
        same(nnx.state(ours), nnx.state(theirs))
    return actual


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Hundreds of small programs are compiled here, and none is run for its speed."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def no_jax_ad(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's own transforms raise."""

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
    theirs = nnx.grad(f, argnums=2 if argnums == -1 else argnums)(*build())  # nnx has no negatives
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


class Stack(nnx.Module):
    """Layers that are scanned or unrolled, marked by `mark`."""

    def __init__(self, mark: Callable[..., Any], *, scan: bool):
        keys = jax.random.split(jax.random.key(0), 2)
        build = lambda key: Layer(nnx.Rngs(key))
        self.layers = nnx.vmap(build)(keys) if scan else nnx.List([build(k) for k in keys])
        self.mark, self.scan = mark, scan

    def __call__(self, x: jax.Array) -> jax.Array:
        run = self.mark(Layer.__call__)
        if self.scan:
            scan = nnx.scan(lambda x, layer: run(layer, x), in_axes=(nnx.Carry, 0),
                            out_axes=nnx.Carry)  # fmt: skip
            return scan(x, self.layers)
        for layer in self.layers:
            x = run(layer, x)
        return x


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(3, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.float32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.dropout(jnp.sin(jax.ad_checkpoint.checkpoint_name(self.dense(x), "dense")))


POLICY = xform.policies.save_only_these_names("dense")
MARKS = {
    "nnx": functools.partial(nnx.remat, policy=POLICY),
    "xform": functools.partial(xform.flax.remat, policy=POLICY),
    "xform graph": functools.partial(xform.flax.remat, **GRAPH),
    "xform tree": functools.partial(xform.flax.remat, **TREE),
}


@pytest.fixture(scope="module")
def expected() -> dict[bool, Any]:
    """By whether the layers are scanned: value and gradient, and the state after."""
    out = {}
    for scan in (False, True):
        model = Stack(lambda f: f, scan=scan)
        out[scan] = nnx.jit(nnx.value_and_grad(loss))(model, X), nnx.state(model)
    return out


@pytest.mark.parametrize(
    ("mark", "scan"),
    [("nnx", False), ("xform", False), *((mark, True) for mark in MARKS)],
)
def test_remat(mark: str, scan: bool, expected: dict[bool, Any]) -> None:
    model = Stack(MARKS[mark], scan=scan)
    actual = nnx.jit(xform.flax.value_and_grad(loss))(model, X)
    same((actual, nnx.state(model)), expected[scan])


def test_remat_in_pure_code(expected: dict[bool, Any]) -> None:
    graphdef, params, rest = nnx.split(Stack(MARKS["xform"], scan=True), nnx.Param, ...)

    @jax.jit
    @xform.value_and_grad
    def f(params: nnx.State, rest: nnx.State, x: jax.Array) -> jax.Array:
        return loss(nnx.merge(graphdef, params, rest, copy=True), x)

    same(f(params, rest, X), expected[True][0])


@pytest.mark.parametrize("remat", [nnx.remat, xform.flax.remat], ids=["nnx", "xform"])
def test_remat_policy_is_honoured(remat: Callable[..., Any]) -> None:
    """What the backward pass recomputes shows as equations in the program."""

    def sines(**options: Any) -> int:
        graphdef, state = nnx.split(Plain())
        run = remat(lambda m, x: jnp.sin(jnp.sin(m(x))), **options) if options else (
            lambda m, x: jnp.sin(jnp.sin(m(x))))  # fmt: skip
        f = lambda state, x: xform.flax.grad(lambda m, x: run(m, x).sum())(
            nnx.merge(graphdef, state), x
        )
        return str(jax.make_jaxpr(f)(state, X)).count("tanh")

    kept = sines()
    assert sines(policy=xform.policies.save_everything) == kept
    assert sines(policy=jax.checkpoint_policies.nothing_saveable) > kept


def test_remat_in_a_lax_scan_and_as_method() -> None:
    class Block(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        @xform.flax.remat(policy=xform.policies.save_dots, static_argnums=2)
        def __call__(self, x: jax.Array, power: int = 1) -> jax.Array:
            return jnp.sin(self.dense(x)) ** power

    def f(model: Block, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(model)
        body = lambda x, _: (nnx.merge(graphdef, state)(x, 2), None)
        return jnp.sum(jax.lax.scan(body, x, length=3)[0])

    def g(model: Block, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.sin(model.dense(x)) ** 2
        return jnp.sum(x)

    chex.assert_trees_all_close(
        xform.flax.grad(f)(Block(), X), nnx.grad(g)(Block(), X), rtol=1e-5, atol=1e-6
    )


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


def _counting(t: Any, kind: str) -> Any:
    """Value and gradient by a transform module, and the count, of a module of hijax Variables."""
    with nnx.var_defaults(hijax=True):
        model = nnx.Dict(w=nnx.Param(X[:3]), count=nnx.Variable(jnp.float32(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    params = nnx.with_vars(params, hijax=False)

    def once(params: Any, rest: Any) -> jax.Array:
        inside = nnx.merge(graph, params, rest)
        inside.count[...] += 1
        return inside.count[...] * jnp.sum(jnp.sin(X @ inside.w[...]))

    def twice(params: Any, rest: Any) -> jax.Array:
        return once(params, rest) + 10 * once(params, rest)

    over = lambda params: twice(params, rest)
    made = {
        "closed over": lambda: jax.jit(t.value_and_grad(over))(params),
        "argument": lambda: jax.jit(t.value_and_grad(twice))(params, rest),
        "jitted": lambda: t.value_and_grad(lambda p: jax.jit(twice)(p, rest))(params),
        "jvp": lambda: jax.jit(lambda p: t.jvp(over, (p,), (p,)))(params),
    }[kind]()
    return jax.tree.leaves(made), model.count[...]


@HIJAX
@pytest.mark.parametrize("kind", ["closed over", "argument", "jitted", "jvp"])
def test_hijax_variables_are_read_and_written_in_order(kind: str) -> None:
    chex.assert_trees_all_close(_counting(xform, kind), _counting(jax, kind), rtol=1e-5)


@HIJAX
@pytest.mark.parametrize("place", [lambda f: f, jax.jit])
def test_a_hijax_variable_of_what_is_differentiated_is_refused(place: Any) -> None:
    def kept(w: jax.Array) -> jax.Array:
        return jnp.sum(nnx.Variable(w, hijax=True)[...] ** 2)

    def written(w: jax.Array) -> jax.Array:
        total[...] = jnp.sum(w)
        return total[...]

    total = nnx.Variable(jnp.float32(0), hijax=True)
    for f in (kept, written):
        with pytest.raises(NotDifferentiable, match="where no derivative can follow"):
            place(xform.grad(f))(X)
    with pytest.raises(WrongDtype, match="mutable value"):
        place(xform.grad(lambda v: v[...]))(total)
    with pytest.raises(NotDifferentiable, match="write it twice"):
        place(xform.grad(xform.checkpoint(lambda x: total[...] * x)))(1.0)


def test_decorators() -> None:
    @xform.flax.value_and_grad(argnums=1, policy=xform.policies.save_dots)
    def f(model: Mlp, x: jax.Array) -> jax.Array:
        """Its docstring."""
        return loss(model, x)

    assert (f.__name__, f.__doc__) == ("f", "Its docstring.")
    same(f(Mlp(), X), nnx.value_and_grad(loss, argnums=1)(Mlp(), X))
    assert jnp.isfinite(xform.flax.grad(has_aux=False)(loss)(Mlp(), X).leave.bias[...]).all()


def test_errors() -> None:
    model = Mlp()
    with pytest.raises(NotScalar, match=r"value_and_grad of __call__.*\n.*shape \(4, 2\)"):
        xform.flax.value_and_grad(Mlp.__call__)(model, X)
    with pytest.raises(NotScalar, match=r"returned a Variable or a module"):
        xform.flax.grad(lambda model: model.leave.bias)(model)
    nothing = r"nothing to differentiate\n(.*\n)*.*RngCount(.*\n)*.*DiffState"
    with pytest.raises(WrongArgument, match=nothing):
        xform.flax.grad(lambda rngs: rngs.uniform(()))(nnx.Rngs(0))
    with pytest.raises(WrongArgument, match="nothing to differentiate"):
        xform.flax.grad(loss, nnx.DiffState(0, nnx.Cache))(model, X)
    with pytest.raises(WrongArgument, match=r"grad of Mlp.__call__(.*\n)*.*bound to a Mlp"):
        xform.flax.grad(model.__call__)
    with pytest.raises(WrongArgument, match="bound to a Mlp"):
        xform.flax.remat(functools.partial(model.__call__, x=X))
    with pytest.raises(WrongArgument, match="not a pair"):
        xform.flax.grad(loss, has_aux=True)(model, X)
    with pytest.raises(WrongArgument, match="twice"):
        xform.flax.grad(loss, (0, -2))(model, X)
    with pytest.raises(WrongArgument, match="2 positional arguments"):
        xform.flax.grad(loss, nnx.DiffState(2, nnx.Param))(model, X)
    with pytest.raises(WrongArgument, match="by a DiffState"):
        xform.flax.grad(loss, nnx.DiffState(0, nnx.Param), **GRAPH)
    for door in (xform.flax.vjp, xform.flax.jvp):
        with pytest.raises(WrongArgument, match="graph_updates=True"):
            door(loss, (model, X), (model, X), graph_updates=True)
    with pytest.raises(WrongDtype, match="allow_int"):
        xform.flax.grad(loss, **TREE)(Mlp(dropout=0.5), X)
    with pytest.raises(WrongTangent):
        xform.flax.jvp(loss, (Plain(), X), (X, X))
    with pytest.raises(WrongArgument, match="polic"):
        xform.flax.remat(loss, policy="nothing")


@MODES
@pytest.mark.parametrize("argnums", [(0, 0), "a", 1.5, None, ("a",), X, nnx.StateAxes({...: 0})])
def test_a_gradient_by_nothing_is_refused_when_it_is_made(argnums: Any, modes: Any) -> None:
    for door in (xform.flax.grad, xform.flax.value_and_grad):
        with pytest.raises(WrongArgument, match="argnums"):
            door(loss, argnums, **modes)


def test_a_module_that_is_closed_over_cannot_be_changed() -> None:
    model = Plain()
    with pytest.raises(Exception, match="trace level"):
        xform.flax.grad(lambda x: model(x).sum())(X)


def test_without_flax() -> None:
    """`import xform` needs no Flax, and `xform.flax` says how to get it."""
    code = """
import sys
import xform
assert "flax" not in sys.modules
sys.modules["flax"] = None  # as if it were not installed
try:
    xform.flax
except xform.errors.XformError as e:
    print(e)
try:
    xform.nothing
except AttributeError as e:
    print(e)
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout  # fmt: skip
    assert "pip install 'jax-xform[train]'" in out
    assert "has no attribute 'nothing'" in out


class Linen(nn.Module):
    """Linen with everything: scanned and remat-marked blocks, dropout, statistics."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        block = nn.remat(LinenBlock, static_argnums=(2,))
        stack = nn.scan(
            block, variable_axes={"params": 0, "batch_stats": 0}, in_axes=nn.broadcast,
            split_rngs={"params": True, "dropout": True}, length=2,
        )  # fmt: skip
        x, _ = stack(name="stack")(x, train)
        return nn.Dense(2)(x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> Any:
        y = nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))
        return x + nn.Dropout(0.5, deterministic=not train)(jnp.sin(y)), None


def test_linen_apply_is_pure() -> None:
    model, key = Linen(), jax.random.key(1)
    variables = jax.jit(model.init)({"params": key, "dropout": key}, X)

    def f(params: Any, stats: Any, x: jax.Array) -> Any:
        y, updates = model.apply(
            {"params": params, "batch_stats": stats}, x, rngs={"dropout": key},
            mutable=["batch_stats"],
        )  # fmt: skip
        return jnp.mean(y**2), updates["batch_stats"]

    args = variables["params"], variables["batch_stats"], X
    expected = jax.jit(jax.value_and_grad(f, has_aux=True))(*args)
    same(jax.jit(xform.value_and_grad(f, has_aux=True))(*args), expected)
