"""Operands with different shardings on explicit axes; parts with axes of another type."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import xform
from tests.sharding import agree, inputs, mesh, placed, same, types

pytestmark = pytest.mark.usefixtures("x64")


@jax.custom_vjp
def _square(x: Any) -> Any:
    return x * x


_square.defvjp(lambda x: (x * x, x), lambda x, ct: (2 * ct * x,))

# Each reads its arguments more than once, so its cotangents are added up.
PARTS: dict[str, Callable[[Any, Any], Any]] = {
    "twice": lambda x, w: jnp.sum(x * jnp.tanh(x @ w)) + jnp.sum(w * w),
    "loop": lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), jnp.sum(c)), x, length=2)[1][1],
    "custom": lambda x, w: jnp.sum(_square(x @ _square(w)) * jnp.sum(w)),
    "remat": lambda x, w: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w) * x)(x)),
    "branches": lambda x, w: jnp.sum(lax.cond(w[0, 0] > 0, jnp.sin, jnp.cos, x) @ w @ w),
}
CHANGES: dict[AxisType, Callable[..., Any]] = {
    AxisType.Explicit: lambda f: jax.sharding.auto_axes(f, out_sharding=P()),
    AxisType.Auto: lambda f: jax.sharding.explicit_axes(f, in_sharding=(P("i"), P())),
}


def _around(f: Callable[[Any, Any], Any], kind: AxisType) -> Callable[[Any, Any], Any]:
    """Read the inputs outside the part too, and call the part twice."""
    part = CHANGES[kind](f)
    return lambda x, w: part(x, w) * jnp.sum(x * x) + part(2 * x, w * w) + jnp.sum(w)


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("name", PARTS)
def test_gradients_are_those_of_jax(name: str, kind: AxisType) -> None:
    with jax.set_mesh(mesh(kind)):
        agree(_around(PARTS[name], kind), *placed(kind))


@pytest.mark.parametrize("kind", CHANGES)
def test_other_transforms_are_those_of_jax(kind: AxisType) -> None:
    f = _around(PARTS["twice"], kind)

    def every(t: Any, x: Any, w: Any) -> Any:
        again = t.grad(lambda w: jnp.sum(jnp.sin(t.grad(f, 1)(x, w))))(w)
        return t.jvp(f, (x, w), (x * x, w)), t.linearize(f, x, w)[1](x, w), again

    with jax.set_mesh(mesh(kind)):
        x, w = placed(kind)
        got, wanted = jax.jit(lambda x, w: (every(xform, x, w), every(jax, x, w)))(x, w)
        assert types(got) == types(wanted)
        same(got, wanted)
        eager = xform.grad(f, (0, 1))(x, w)
        same(eager, jax.grad(f, (0, 1))(x, w))


# Elementwise operations of two operands, only one of which is sharded along the axis.
MEETING: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, w: x + w,
    "atan2": jnp.arctan2,
    "fmod": lambda x, w: jnp.fmod(x, w + 3),
    "relu": lambda x, w: jax.nn.relu(x - w),
    "softmax": lambda x, w: jax.nn.softmax(x * w),
    "remat": lambda x, w: jax.checkpoint(lambda w: jnp.sin(x * w) + w)(w),
    "cond": lambda x, w: lax.cond(jnp.sum(x) < 0, lambda: x * w, lambda: x),
    "scan": lambda x, w: lax.scan(lambda c, _: (jnp.sin(c * w), None), x * w, None, length=2)[0],
}


@pytest.mark.parametrize("name", MEETING)
def test_derivatives_lie_where_their_types_say(name: str) -> None:
    """As in JAX: replicated values have replicated gradients; tangents are sharded like results."""
    f = MEETING[name]

    def every(t: Any, x: Any, w: Any) -> Any:
        for args, held in (((x, w), f), ((w,), lambda w: f(x, w)), ((x,), lambda x: f(x, w))):
            scalar = lambda *args, held=held: jnp.sum(jnp.sin(held(*args)))
            grad = t.grad(scalar, tuple(range(len(args))))
            yield grad(*args), t.jvp(held, args, args), t.jvp(grad, args, args)
            yield t.linearize(held, *args)[1](*args)

    with jax.set_mesh(mesh(AxisType.Explicit)):
        x, _ = placed(AxisType.Explicit)
        w = jnp.linspace(0.1, 0.9, 32).reshape(8, 4)
        got, wanted = jax.jit(lambda *args: tuple([*every(t, *args)] for t in (xform, jax)))(x, w)
    assert types(got) == types(wanted)
    same(got, wanted)


def _alike(run: Callable[[Any], Any]) -> None:
    """Check that xform's results equal JAX's, with the same shardings."""
    got, wanted = jax.jit(lambda: (run(xform), run(jax)))()
    assert types(got) == types(wanted)
    whole = lambda tree: jax.tree.map(lambda x: jax.reshard(x, P()) if x.ndim else x, tree)
    same(whole(got), whole(wanted))


def test_a_part_reads_numbers_that_lie_nowhere() -> None:
    with jax.set_mesh(mesh(AxisType.Explicit)):
        part = lambda w: jax.sharding.auto_axes(lambda x: w * x, out_sharding=P())
        f = lambda w, x: lax.scan(lambda x, _: (part(w)(x), None), x, None, length=3)[0]
        grad = lambda t: jax.jit(t.grad(f, (0, 1)))(1.5, 2.0)
        assert types(grad(xform)) == types(grad(jax))
        same(grad(xform), grad(jax))


def test_lanes_lie_where_they_lay() -> None:
    with jax.set_mesh(mesh(AxisType.Explicit, i=2, j=4)):
        x = jax.device_put(jnp.arange(16.0).reshape(2, 8), P("i"))
        at = jax.device_put(jnp.arange(8).reshape(2, 4), P("i"))
        taken = lambda x, at: jnp.sum(x.at[at].get(out_sharding=P("j")) ** 2)
        _alike(lambda t: jax.vmap(t.grad(taken))(x, at))


def test_copies_have_partial_sums_as_cotangents() -> None:
    """The copies are a broadcast, an unused half, and a branch that does not read them."""
    with jax.set_mesh(mesh(AxisType.Explicit)):
        row = jax.device_put(jnp.arange(4.0), P(reduced={"i"}))
        wide = lambda row: lax.broadcast_in_dim(row, (8, 4), [1], out_sharding=P("i", None))
        _alike(lambda t: t.grad(lambda row: jnp.sum(wide(row) ** 2))(row))

        x = jax.device_put(inputs()[0], P("i"))
        w = jax.device_put(jnp.arange(32.0).reshape(4, 8), P(reduced={"i"}))
        half = lambda x, w: jnp.sum(jnp.sin(x @ jnp.split(w, 2, axis=1)[0]))
        _alike(lambda t: t.grad(half, (0, 1))(x, w))

        def chosen(new: Any, first: Any, x: Any) -> Any:
            copied = lambda: jax.reshard(x, P(reduced={"i"}))
            step = lambda _, carry: lax.cond(new, copied, lambda: carry)
            last = lax.fori_loop(0, 3, step, first)
            return jnp.sum(jax.reshard(last, P("i")) ** 2)

        first = jax.device_put(jnp.ones(8), P(reduced={"i"}))
        x = jax.device_put(jnp.arange(8.0), P("i"))
        _alike(lambda t: t.grad(chosen, (1, 2))(jnp.asarray(True), first, x))


def test_a_users_rule_is_given_zeros_that_are_partial_sums() -> None:
    """For copies on each device the zeros are partial sums, as in JAX; for an integer, a float0."""
    seen: list[list[str]] = []
    pair = jax.custom_vjp(lambda w: (jnp.sin(w), 2 * w, jnp.arange(3)))

    def back(w: Any, cts: Any) -> Any:
        seen.append(types(cts))
        return (cts[0],)

    pair.defvjp(lambda w: (pair(w), w), back)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        w = jax.device_put(jnp.arange(8.0), P(reduced={"i"}))
        _alike(lambda t: t.grad(lambda w: jnp.sum(jax.reshard(pair(w)[0], P("i"))))(w))
    assert seen == [["float64[8]{U:i}", "float64[8]{U:i}", "float0[3]"]] * 2
