"""Stacked results of loops that are added to an array, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import xform
from xform import passes
from xform._jax import scan_counts, scan_p

N, M = 6, 32
SHAPE = (N, M, M)


def data(dtype=np.float32):
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.normal(size=SHAPE), dtype) for _ in range(2))


def carried_values(f, *args) -> list[int]:
    """Return how many values each loop of a function carries."""
    eqns = jax.make_jaxpr(f)(*args).eqns
    return [scan_counts(e.params)[1] for e in eqns if e.primitive is scan_p]


def check(f, *args, carried: list[int]) -> None:
    """The pass leaves this many carried values, and the results bit by bit."""
    assert carried_values(passes.SumInLoops()(f), *args) == carried
    wanted, got = jax.jit(f)(*args), jax.jit(passes.SumInLoops()(f))(*args)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_stacked_result_is_added_in_the_loop(reverse: bool) -> None:
    def f(total, xs):
        step = lambda c, x: (c * 0.5 + x[0, 0], (x * c, x - c))
        c, (a, b) = lax.scan(step, 1.0, xs, reverse=reverse)
        return total + a, b, c

    check(f, *data(), carried=[2])


def test_two_results_of_a_loop_are_added_to_two_arrays() -> None:
    def both(total, other, xs):
        _, (a, b) = lax.scan(lambda c, x: (c, (jnp.sin(x), jnp.cos(x))), None, xs)
        return a + total, other + b

    check(both, *data(), data()[1], carried=[2])


def test_a_result_is_converted_before_the_sum() -> None:
    def f(total, xs):
        _, a = lax.scan(lambda c, x: (c, x * x), None, xs.astype(jnp.bfloat16))
        return total + a.astype(jnp.float32)

    exact = [jnp.round(x) for x in data()]  # with exact squares: XLA may skip a rounding
    check(f, *exact, carried=[1])


def unknown_array(total, xs):
    c, a = lax.scan(lambda c, x: (c + x, x * x), total[0], xs)
    return c + a  # the array depends on the loop


def read_twice(total, xs):
    _, a = lax.scan(lambda c, x: (c, x * x), None, xs)
    return total + a, a[0]


def array_read_twice(total, xs):
    _, a = lax.scan(lambda c, x: (c, x * x), None, xs)
    return total + a, total * 2


def an_output(total, xs):
    _, a = lax.scan(lambda c, x: (c, x * x), None, xs)
    return total + a, a


def twice_itself(total, xs):
    _, a = lax.scan(lambda c, x: (c, x * x), None, xs)
    return a + a + total[0, 0, 0]


def a_number(total, xs):
    _, a = lax.scan(lambda c, x: (c, x * x), None, xs)
    return a + 1.0, total


@pytest.mark.parametrize(
    "f", [unknown_array, read_twice, array_read_twice, an_output, twice_itself, a_number]
)
def test_other_results_stay(f) -> None:
    args = data()
    check(f, *args, carried=carried_values(f, *args))


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float16"])
def test_dtypes(dtype: str) -> None:
    def f(total, xs):
        _, a = lax.scan(lambda c, x: (c, x * x), None, xs)
        return total + a

    args = [jnp.asarray(np.abs(x) * 3).astype(dtype) for x in data()]
    check(f, *args, carried=[0 if dtype == "bool" else 1])


def test_empty_loops() -> None:
    def f(total, xs):
        _, a = lax.scan(lambda c, x: (c, x * 2), None, xs)
        return total + a

    empty = jnp.zeros((0, 3))
    check(f, empty, empty, carried=[0])


def test_the_stack_takes_no_memory() -> None:
    def gradients(ws, xs):
        def loss(ws, x):
            return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)

        add = lambda total, x: (total + xform.grad(loss)(ws, x), None)
        return lax.scan(add, jnp.zeros_like(ws), xs)[0]

    ws, xs = jnp.ones((16, 128, 128)), jnp.ones((4, 16, 128))
    temp = lambda f: jax.jit(f).lower(ws, xs).compile().memory_analysis().temp_size_in_bytes
    assert temp(gradients) - temp(passes.SumInLoops()(gradients)) >= 0.9 * ws.nbytes
    np.testing.assert_array_equal(
        jax.jit(passes.SumInLoops()(gradients))(ws, xs), jax.jit(gradients)(ws, xs)
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sharded_arrays(kind: AxisType, axis: int) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    spec = PartitionSpec(*("x" if i == axis else None for i in range(3)))
    args = [jax.device_put(x, NamedSharding(mesh, spec)) for x in data()]

    def f(total, xs):
        _, a = lax.scan(lambda c, i: (c, xs[:, i] * 2), None, jnp.arange(M))
        return total + jnp.moveaxis(a, 0, 1)

    def g(total, xs):
        _, a = lax.scan(lambda c, x: (c, x * 2), None, xs)
        return total + a

    with jax.set_mesh(mesh):
        if not (kind is AxisType.Explicit and axis == 0):  # a scan over a sharded axis
            check(g, *args, carried=[1])
        if axis != 1:
            check(f, *args, carried=[0])
