"""Slices of a draw have the bits of the whole draw."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import xform
from tests.sharding import mesh
from xform.program.ir import Program, trace
from xform.slices.draws import draw_slice, draws_each_element
from xform.slices.opened import opened

MIB = 2**20


@pytest.mark.parametrize(("sizes", "axis"), [((6,), 0), ((6, 8, 4), 0), ((6, 8, 4), 1),
                                             ((6, 8, 4), 2), ((1, 12), 1)])  # fmt: skip
@pytest.mark.parametrize("n", [2, 4])
def test_the_slices_of_a_draw_are_the_draw(sizes: tuple[int, ...], axis: int, n: int) -> None:
    key, length = jax.random.key(7), sizes[axis] // n
    whole = jax.random.bits(key, (*sizes[:axis], n * length, *sizes[axis + 1 :]))
    place = lambda at: lambda i: i + jnp.uint32(at * length)
    draw = jax.jit(lambda at: draw_slice(whole.shape, key, axis, place(at), length))
    parts = [draw(jnp.int32(i))[0] for i in range(n)]
    np.testing.assert_array_equal(np.concatenate(parts, axis), whole)


def draws(f: Any, *args: Any) -> list[Any]:
    prog: Program = opened(trace(lambda *xs: [f(*xs)], *args))
    return [e for e in prog.equations if e.primitive.name == "random_bits"]


def test_which_draws_can_be_sliced() -> None:
    key = jax.random.key(0)
    (eqn,) = draws(lambda k: jax.random.uniform(k, (4, 3)), key)
    assert draws_each_element(eqn)
    with jax.threefry_partitionable(False):
        assert not draws_each_element(eqn)
    others = {
        "another generator": (lambda k: jax.random.bits(k, (4,)), jax.random.key(0, impl="rbg")),
        "narrow numbers": (lambda k: jax.random.bits(k, (4,), "uint8"), key),
        "a key for each row": (
            jax.vmap(lambda k: jax.random.bits(k, (4,))), jax.random.split(key, 3)),
    }  # fmt: skip
    for name, (f, k) in others.items():
        (eqn,) = draws(f, k)
        assert not draws_each_element(eqn), name


def loss(ws: Any, x: Any, key: Any) -> Any:
    """Two layers with dropout between them."""
    h = jnp.tanh(x @ ws[0])
    h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), 2 * h, 0)
    return jnp.mean((h @ ws[1]) ** 2)


def arguments(rows: int) -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.normal(size=shape) / 8, "float32")
    return (normal(16, 512), normal(512, 16)), normal(rows, 16), jax.random.key(1)


def test_a_loss_with_dropout_in_slices() -> None:
    """The bits of all rows would take 8 MiB."""
    args = arguments(4096)
    plan = xform.plan(loss, *args, policy=f"slices:budget:{MIB}")
    assert plan.slices
    assert plan.compiled_bytes is not None
    assert plan.compiled_bytes <= MIB
    got = jax.jit(xform.grad(loss, policy=plan))(*args)
    want = jax.jit(jax.grad(loss))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_draws_on_a_mesh(kind: Any) -> None:
    """Types over Explicit axes say how a draw is sharded, and a slice of it would not be."""
    where = mesh(kind, data=1, model=1)
    with jax.set_mesh(where):
        key = jax.device_put(jax.random.key(0), NamedSharding(where, P()))
        (eqn,) = draws(lambda k: jax.random.uniform(k, (4, 3)), key)
    assert draws_each_element(eqn) == (kind == AxisType.Auto)


@pytest.mark.skipif(jax.device_count() < 8, reason="a mesh of eight devices")
@pytest.mark.parametrize("devices", [1, 8])
def test_a_step_with_dropout_on_auto_axes(devices: int) -> None:
    where = mesh(AxisType.Auto, data=devices)
    rows, whole = (NamedSharding(where, P(*spec)) for spec in (("data",), ()))
    args = arguments(devices * 256)
    options: Any = {"in_shardings": (whole, rows, whole), "out_shardings": whole}
    plain = jax.jit(jax.value_and_grad(loss), **options)
    figures: Any = plain.lower(*args).compile().memory_analysis()
    ends = figures.argument_size_in_bytes + figures.output_size_in_bytes
    budget = xform.policies.budget(ends + figures.temp_size_in_bytes // 3, slices=True)
    step = xform.jit(xform.value_and_grad(loss), budget, **options)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
                 step(*args), plain(*args))  # fmt: skip
    (plan,) = step.plan
    assert plan.slices
