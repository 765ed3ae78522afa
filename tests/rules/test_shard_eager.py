"""Derivatives of `shard_map` outside `jit`, and of partial sums, against JAX's under `jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xform
from tests.reference import compilations
from tests.sharding import BATCH, checked, inputs, mesh, same, shard, total, types
from xform.errors import WrongTangent

pytestmark = pytest.mark.usefixtures("x64")


def _tanh(x: Any, w: Any) -> Any:
    return total(jnp.sin(jnp.tanh(x @ w) * x))


def _both(f: Callable[[Any], Any]) -> None:
    """Check that `f` has JAX's results and types with xform, in and outside `jit`."""
    wanted = jax.jit(lambda: f(jax))()
    for got in (f(xform), jax.jit(lambda: f(xform))()):
        assert types(got) == types(wanted)
        same(got, wanted)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda t, f, x, w: t.grad(f, (0, 1))(x, w),
    "jvp": lambda t, f, x, w: t.jvp(f, (x, w), (x * 2, w)),
    "vjp": lambda t, f, x, w: t.vjp(f, x, w)[1](jnp.float64(2)),
    "linearize": lambda t, f, x, w: t.linearize(f, x, w)[1](x * 2, w),
    "hvp": lambda t, f, x, w: t.jvp(t.grad(f, 1), (x, w), (x * 2, w)),
    "grad of grad": lambda t, f, x, w: t.grad(lambda w: jnp.sum(jnp.sin(t.grad(f, 1)(x, w))))(w),
    "remat": lambda t, f, x, w: t.grad(getattr(t, "remat", jax.checkpoint)(f), 1)(x, w),
    "jacrev": lambda t, f, x, w: t.jacrev(f, 1)(x, w),
    "vmap": lambda t, f, x, w: jax.vmap(t.grad(f, 1), (None, 0))(x, jnp.stack([w, 2 * w])),
}
QUICK = ("grad", "hvp")


@checked
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in TRANSFORMS],
)
def test_transforms(name: str, check_vma: bool) -> None:
    f = shard(_tanh, check_vma)
    _both(lambda t: TRANSFORMS[name](t, f, *inputs()))


@pytest.mark.parametrize("name", ["jvp", "vjp"])
def test_no_tracer_outlives_its_trace(name: str) -> None:
    with jax.checking_leaks():
        TRANSFORMS[name](xform, shard(_tanh), *inputs())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("check_vma", [pytest.param(True, marks=pytest.mark.slow), False])
def test_partly_manual(kind: AxisType, check_vma: bool) -> None:
    """Without types that state what varies, JAX runs it only under `jit`."""
    with jax.set_mesh(mesh(kind, i=4, j=2)):
        x, w = inputs()
        x, w = jax.device_put(x, P("i")), jax.device_put(w, P())
        f = jax.shard_map(
            _tanh, in_specs=BATCH, out_specs=P(), axis_names={"i"}, check_vma=check_vma
        )
        _both(lambda t: t.grad(f, (0, 1))(x, w))


def test_lanes_of_a_vmap_lie_along_an_axis() -> None:
    """A value replicated along an axis is not summed there, because lanes may use it."""
    f = jax.shard_map(
        lambda x: 3 * jnp.sum(x) + jnp.sum(jnp.sin(x)),
        mesh=mesh(i=4, j=2),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    g = lambda x: jnp.sin(f(x))
    x = inputs()[0]
    for each in (f, g):
        got = jax.vmap(xform.grad(each), spmd_axis_name="i")(x)
        same(got, jax.vmap(jax.grad(each))(x))


def test_an_unused_value_from_outside() -> None:
    """Its zeros have the type of the mesh outside."""

    def step(w: Any, x: Any) -> Any:
        inside = lambda x: xform.value_and_grad(lambda w, x: jnp.sum(x))(w, x)
        f = jax.shard_map(inside, mesh=mesh(), in_specs=P("i"), out_specs=P(), check_vma=False)
        return f(x)

    x, w = inputs()
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh(), P()))
    same(jax.jit(step)(jax.device_put(w, x.sharding), x)[1], jnp.zeros((4, 4)))


def test_all_gather_in_a_remat_region_is_recomputed_not_saved() -> None:
    """The gathered copy of sharded weights is not saved for the backward pass."""
    f = xform.remat(
        shard(lambda x: lax.all_gather(x, "i") * lax.all_gather(x, "i"), True, P("i"), P("i"))
    )
    x = jnp.ones(8)
    kept = jax.make_jaxpr(lambda x: xform.vjp(f, x)[1])(x).jaxpr.outvars
    assert [v.aval.shape for v in kept] == [(8,)]
    same(xform.grad(lambda x: jnp.sum(f(x)))(x), jax.grad(lambda x: jnp.sum(f(x)))(x))


def test_linearize_in_shard_map_refuses_varying_tangent_of_invariant_primal() -> None:
    """A tangent may vary only where its primal does."""
    f = lambda x: jnp.mean(x**2)

    def body(p: Any, t: Any) -> Any:
        _, fwd = xform.linearize(f, p)
        return xform.linear_transpose(fwd, p)(fwd(t))[0]

    one, t = jnp.array([1.0]), jnp.ones(8)
    with pytest.raises(WrongTangent, match=r"applying `jax.lax.pcast\(..., \('i',\)"):
        shard(lambda t: body(one, t), True, P("i"), P("i"))(t)
    varies = lambda t: body(lax.pcast(one, "i", to="varying"), t)
    same(shard(varies, True, P("i"), P("i"))(t), 4 * jnp.ones(8))


# Partial sums: axes that a spec declares unreduced or reduced.


def _explicit() -> Any:
    return jax.set_mesh(mesh(AxisType.Explicit))


def test_a_partial_sum_leaves() -> None:
    with _explicit():
        x = jax.device_put(inputs()[0], P("i"))
        f = jax.shard_map(
            lambda x: lax.pcast(x * x, "i", to="unreduced"), out_specs=P(unreduced={"i"})
        )
        _both(lambda t: t.grad(lambda x: jnp.sum(jnp.sin(jax.reshard(f(x), P()))))(x))


def test_a_cotangent_of_a_copy_is_a_partial_sum() -> None:
    """On each device the terms are not the gradient; their sum is."""
    with _explicit():
        w = jax.device_put(inputs()[1], P(reduced={"i"}))
        f = jax.shard_map(lambda w: (w * w).reshape(16), out_specs=P(reduced={"i"}))
        # A sum, a reshape and squares; a custom rule that returns None; a product with rows.
        keeps = jax.custom_vjp(lambda w: w)
        keeps.defvjp(lambda w: (w, None), lambda _, ct: (None,))
        none = jax.shard_map(keeps, out_specs=P(reduced={"i"}))
        x = jax.device_put(inputs()[0], P("i"))
        rows = jax.shard_map(lambda x, w: jnp.sin(x @ w), out_specs=P("i"))
        for g in (f, none, lambda w: rows(x, w)):
            run = lambda t, g=g: t.grad(lambda w: g(w).sum())(w)
            got, wanted = jax.jit(lambda run=run: (run(xform), run(jax)))()
            assert types(got) == types(wanted) == ["float64[4,4]{U:i}"]
            same(jax.reshard(got, P()), jax.reshard(wanted, P()))


def test_gradient_through_reshard_of_a_reduced_array_equals_jax() -> None:
    with _explicit():
        w = jax.device_put(inputs()[1], P(reduced={"i"}))
        run = lambda t: t.grad(lambda w: jnp.sum(jnp.sin(jax.reshard(w, P()))))(w)
        got, wanted = jax.jit(lambda: (run(xform), run(jax)))()
        assert types(got) == types(wanted)
        same(jax.reshard(got, P()), jax.reshard(wanted, P()))


def test_a_replicated_cotangent_of_a_copy() -> None:
    """It is made a partial sum first, which JAX leaves to the caller."""
    with _explicit():
        w = jax.device_put(inputs()[1], P(reduced={"i"}))
        f = jax.shard_map(lambda w: jnp.sin(w), out_specs=P(reduced={"i"}))
        ct = jnp.ones((4, 4))
        got = jax.jit(lambda w, ct: jax.reshard(xform.vjp(f, w)[1](ct)[0], P()))(w, ct)
        same(got, jnp.cos(inputs()[1]))


def test_partial_sums_without_types() -> None:
    """Under `check_vma=False` JAX 0.10.2 is wrong by the number of devices; the reference is exact.

    An output that is a partial sum gets the full cotangent on each device, and so does an input.
    """
    x, n = inputs()[0], 8
    with _explicit():
        rows = jax.device_put(x, P("i"))
        out = jax.shard_map(jnp.sin, out_specs=P(unreduced={"i"}), check_vma=False)
        loss = lambda x: jnp.sum(jnp.sin(jax.reshard(out(x), P())))
        got = jax.jit(xform.grad(loss))(rows)
        whole = lambda x: jnp.sum(jnp.sin(jnp.sum(jnp.sin(x).reshape(n, 1, 4), 0)))
        same(np.asarray(got), jax.grad(whole)(np.asarray(x)))
        parts = jax.shard_map(
            lambda x: lax.pcast(x, "i", to="unreduced"), out_specs=P(unreduced={"i"})
        )
        into = jax.shard_map(
            lambda s: jnp.sin(lax.psum(s, "i")),
            in_specs=P(unreduced={"i"}),
            out_specs=P(),
            check_vma=False,
        )
        got = jax.jit(xform.grad(lambda x: jnp.sum(into(parts(x)))))(rows)
        whole = lambda x: jnp.sum(jnp.sin(jnp.sum(x.reshape(n, 1, 4), 0)))
        same(np.asarray(got), jax.grad(whole)(np.asarray(x)))


@pytest.mark.parametrize("partly", [True, False])
def test_a_program_is_compiled_once(partly: bool) -> None:
    """Each call makes a new function, so JAX compiles each of its operations at each call."""
    x, _ = inputs()
    axes = mesh(i=4, j=2) if partly else mesh(i=4)
    f = jax.shard_map(
        lambda x: lax.psum(jnp.sum(jnp.sin(x) * x), "i"),
        mesh=axes,
        in_specs=P("i"),
        out_specs=P(),
        axis_names={"i"},
        check_vma=not partly,
    )
    ways = [
        lambda: xform.grad(f)(x),
        lambda: xform.jvp(f, (x,), (x,)),
        lambda: xform.linearize(f, x)[1](x),
        lambda: xform.jvp(xform.grad(f), (x,), (x,)),
        lambda: jax.vmap(xform.grad(f), axis_size=2, in_axes=None)(x),
    ]
    for way in ways:
        way()
        assert compilations(way) == 0


def test_another_program_is_another() -> None:
    """Compiled programs are found by their text, which includes constants."""
    x, _ = inputs()
    for k in (2.0, 3.0):
        c = np.arange(4.0) + k
        f = shard(lambda x, k=k, c=c: total(k * x) * jnp.sum(c), in_specs=P("i"))
        np.testing.assert_allclose(xform.grad(f)(x), np.full(x.shape, k * c.sum()))


def test_inner_jit_stays_a_call_in_the_pullback_of_shard_map() -> None:
    inner = jax.jit(lambda x: 3 * jnp.sin(x))
    f = shard(lambda x: total(inner(x)), in_specs=P("i"))
    x, _ = inputs()
    pull = jax.make_jaxpr(xform.vjp(f, x)[1])(jnp.float64(1))
    (shards,) = [e for e in pull.eqns if e.primitive.name == "shard_map"]
    calls = [e.params["name"] for e in shards.params["jaxpr"].eqns if e.primitive.name == "jit"]
    assert any("backward" in name for name in calls)
    same(xform.grad(f)(x), jax.jit(jax.grad(f))(x))
