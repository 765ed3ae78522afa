"""Budgets inside a trace: the compiler decides which plans fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import xform
from xform.errors import BudgetInfeasible, UnknownShardings
from xform.memory import compilation
from xform.policies import budget

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="sizes are those on a CPU")

f32 = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")


def states(ws, x):
    """Layers of a state-space model."""
    for w in ws:
        decay = jax.nn.sigmoid(x @ w)
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        x = x + lax.associative_scan(combine, (decay, x @ w.T), axis=0)[1]
    return jnp.mean(x**2)


def physics(ws, xs):
    """A loss of a second derivative."""

    def u(x):
        h = jnp.tanh(x * ws[0, 0] + ws[0, 1])
        return jnp.sum(jnp.tanh(h @ ws[1]))

    return jnp.mean(jax.vmap(jax.grad(jax.grad(u)))(xs[:, 0]) ** 2)


def attention(ws, x):
    for w in ws:
        q = x @ w
        x = x + jax.nn.gelu(jax.nn.softmax(q @ q.T / 10) @ x @ w) @ w.T
    return jnp.sum(x**2)


def lattice(ws, x):
    for w in ws:
        rolled = sum(jnp.roll(x, k, axis) for k in (1, -1) for axis in (0, 1))
        x = jnp.tanh(x @ w) * jnp.cos(rolled)
    return jnp.mean(x**2)


def unread(ws, x):
    """The gradient of the second array is zero, and the user gets it as an array."""
    return jnp.sum(jnp.tanh(jnp.sin(x @ ws[0]) @ ws[0]) + lax.stop_gradient(ws[1][0, 0]))


PROGRAMS = {
    "states": (states, (f32(1, 16, 16), f32(32, 16))),
    "physics": (physics, (f32(2, 64, 64), f32(512, 1))),
    "attention": (attention, (f32(4, 64, 64), f32(128, 64))),
    "lattice": (lattice, (f32(4, 64, 64), f32(256, 64))),
    "unread": (unread, ((f32(16, 16), f32(20, 20)), f32(24, 16))),
}


def total(step, *args) -> int:
    """Return arguments, outputs and temporary bytes of a compiled function."""
    found = jax.jit(step).lower(*args).compile().memory_analysis()
    return (found.argument_size_in_bytes + found.output_size_in_bytes
            + found.temp_size_in_bytes - found.alias_size_in_bytes)  # fmt: skip


def floor(f, *args) -> int:
    with pytest.raises(BudgetInfeasible) as caught:
        jax.eval_shape(xform.grad(f, policy=budget(0)), *args)
    return caught.value.floor_bytes


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_budget_down_to_the_floor_is_kept(name: str) -> None:
    f, args = PROGRAMS[name]
    default, least = total(xform.grad(f), *args), floor(f, *args)
    assert least <= default
    for most in np.linspace(default, least, 3).astype(int):
        assert total(xform.grad(f, policy=budget(int(most))), *args) <= most
    with pytest.raises(BudgetInfeasible, match="compiled"):
        jax.eval_shape(xform.grad(f, policy=budget(least - 1)), *args)


@pytest.mark.parametrize("ask", ["value_and_grad", "vjp"])
def test_budget_counts_values_outputs_and_cotangents(ask: str) -> None:
    """The value of `value_and_grad`, and the cotangents and outputs of `vjp`."""
    f, args = PROGRAMS["lattice"]
    layer = lambda ws, x: jnp.stack([f(ws, x), f(ws, 2 * x)])

    def step(policy, ws, x, ct):
        if ask == "value_and_grad":
            return xform.value_and_grad(f, policy=policy)(ws, x)
        y, pull = xform.vjp(layer, ws, x, policy=policy)
        return y, pull(ct)

    args = *args, f32(2)
    default = total(functools.partial(step, None), *args)
    kept = total(functools.partial(step, budget(default)), *args)
    less = total(functools.partial(step, budget(int(0.97 * default))), *args)
    assert kept == default
    assert less <= 0.97 * default


@pytest.mark.parametrize("aux", [False, True])
def test_a_budget_of_the_floor_is_enough_for_integers_and_auxiliary_outputs(aux: bool) -> None:
    def f(ws, x, i):
        value = unread(ws, x) * jnp.sin(x[0, 0])
        return (value, jnp.cos(x)) if aux else value

    args = *PROGRAMS["unread"][1], jax.ShapeDtypeStruct((30,), "int32")
    ask = lambda n: xform.value_and_grad(
        f, (0, 1, 2), has_aux=aux, allow_int=True, policy=budget(n)
    )
    with pytest.raises(BudgetInfeasible) as caught:
        jax.eval_shape(ask(0), *args)
    assert total(ask(caught.value.floor_bytes), *args) == caught.value.floor_bytes


def test_gradients_are_those_of_jax() -> None:
    f, args = PROGRAMS["attention"]
    rng = np.random.default_rng(0)
    args = [rng.normal(size=a.shape).astype(a.dtype) / 8 for a in args]
    least = floor(f, *args)
    got = jax.jit(xform.grad(f, policy=budget(least)))(*args)
    np.testing.assert_allclose(got, jax.jit(jax.grad(f))(*args), rtol=2e-4, atol=1e-6)


def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of each plan that is compiled from here on."""
    sizes: list[int] = []
    real = compilation.compile_for

    def counted(*args, **options):
        made = real(*args, **options)
        sizes.append(made.total_bytes)
        return made

    monkeypatch.setattr(compilation, "compile_for", counted)
    return sizes


def test_a_second_trace_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    f, args = PROGRAMS["attention"]
    compiled = count(monkeypatch)
    f = lambda ws, x: 3 * attention(ws, x)
    most = int(0.95 * total(xform.grad(f), *args))
    first = jax.make_jaxpr(xform.grad(f, policy=budget(most)))(*args)
    assert 0 < len(compiled) <= 7
    compiled.clear()
    again = jax.make_jaxpr(xform.grad(lambda *xs: f(*xs), policy=budget(most)))(*args)
    assert not compiled
    assert str(first) == str(again)


def test_without_verify_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    f, args = PROGRAMS["lattice"]
    compiled = count(monkeypatch)
    jax.eval_shape(xform.grad(f, policy=budget("100 MiB", verify=False)), *args)
    jax.eval_shape(xform.grad(f, policy=budget("100 MiB", of="saved")), *args)
    jax.eval_shape(xform.grad(f), *args)
    assert not compiled


def test_arrays_that_are_known_are_constants() -> None:
    """They are not arguments of the program, and take none of its bytes."""
    x = np.ones((1 << 12, 64), np.float32)
    f = lambda w: attention(w, x[:64]) + jnp.sum(jnp.sin(x) ** 2) * jnp.sum(w)
    w = f32(3, 64, 64)
    default = total(xform.grad(f), w)
    assert total(xform.grad(f, policy=budget(default)), w) == default


def test_residuals_and_plan_show_the_same_plan() -> None:
    f, args = PROGRAMS["lattice"]
    policy = budget(floor(f, *args))
    rows = lambda by: [str(row) for row in xform.residuals(f, *args, policy=by, argnums=0)]
    assert rows(policy) == rows(xform.plan(f, *args, policy=policy))
    assert rows(policy) != rows(None)


def test_a_warning_says_where_nothing_is_compiled() -> None:
    f = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)
    policy = budget("1 MiB", batch_size=2)
    with pytest.warns(UserWarning, match="is simulated, with a margin.*under vmap"):
        jax.jit(jax.vmap(xform.grad(f, policy=policy))).trace(f32(2, 8, 8), f32(2, 4, 8))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    step = xform.grad(f, policy=budget("1 MiB"))
    inside = jax.shard_map(step, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec,
                           check_vma=False)  # fmt: skip
    with pytest.warns(UserWarning, match=r"inside a shard_map.*xform\.jit.*verify=False"):
        jax.jit(inside).trace(f32(8, 8), f32(4, 8))


@pytest.mark.skipif(jax.device_count() < 8, reason="a mesh of eight devices")
def test_budget_on_explicit_mesh_axes_compiles_with_the_input_shardings() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    place = lambda shape, *spec: jax.ShapeDtypeStruct(
        shape, "float32", sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    w, x = place((4, 64, 64)), place((256, 64), "data")

    def f(ws, x):
        return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)

    default = total(xform.grad(f), w, x)
    assert total(xform.grad(f, policy=budget(default)), w, x) == default


@pytest.mark.skipif(jax.device_count() < 8, reason="a mesh of eight devices")
def test_on_auto_axes_the_shardings_are_not_known() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct((256, 64), "float32",
                             sharding=NamedSharding(mesh, PartitionSpec("data")))  # fmt: skip
    f = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    with pytest.raises(UnknownShardings, match=r"Auto axes {'data': 8}[\s\S]*xform\.jit"):
        jax.jit(xform.grad(f, policy=budget("1 MiB"))).lower(f32(64, 64), x)
