"""Chains of views become fewer operations, with the same elements."""

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import xform
from xform import passes

SIMPLE = passes.Pipeline([passes.Inline(), passes.Simplify(), passes.Dce()])
MOVES = {
    "transpose", "reshape", "squeeze", "broadcast_in_dim", "slice", "dynamic_slice", "rev", "tile",
    "stack",
}  # fmt: skip


def cancel(x):
    """A chain that returns its argument, an array of two or more axes."""
    return jnp.swapaxes(jnp.moveaxis(x[None], 0, -1)[..., 0].T, 0, -1).T.swapaxes(0, -1)


CANCEL: dict[str, Callable] = {
    "slice": lambda x: jnp.transpose(x[None], (2, 0, 1))[:, 0].T,
    "swaps": cancel,
    "reshapes": lambda x: x.reshape(-1)[None].reshape(2, -1).reshape(x.shape),
    "reversed": lambda x: jnp.flip(jnp.flip(x.T, 1).T, 0),
    "wholly sliced": lambda x: lax.dynamic_slice(x.T[None], (0, 3, 2), (1, *x.T.shape))[0].T,
    "repeated": lambda x: jnp.broadcast_to(x.T[:, None], (x.shape[1], 5, x.shape[0]))[:, 3].T,
    "split": lambda x: x.reshape(2, -1, 2, 4).transpose(2, 0, 3, 1).transpose(1, 3, 0, 2)
             .reshape(x.shape),
    "tiled": lambda x: jnp.tile(jnp.atleast_3d(x), (1, 1, 1)).squeeze(-1),
    "stacked": lambda x: jnp.stack([x.T])[0].T,
}  # fmt: skip


@pytest.mark.parametrize("name", CANCEL)
def test_views_that_cancel_leave_their_argument(name: str) -> None:
    x = jax.ShapeDtypeStruct((6, 8), jnp.float32)
    traced = jax.make_jaxpr(SIMPLE(CANCEL[name]))(x)
    assert [str(v) for v in traced.jaxpr.outvars] == [str(v) for v in traced.jaxpr.invars]


def test_a_slice_of_a_repeated_axis_of_one_element_is_the_argument() -> None:
    f = lambda x: lax.slice_in_dim(jnp.broadcast_to(x, (6, 5, 8)), 3, 4, axis=1)
    traced = jax.make_jaxpr(SIMPLE(f))(jax.ShapeDtypeStruct((6, 1, 8), jnp.float32))
    assert [str(v) for v in traced.jaxpr.outvars] == [str(v) for v in traced.jaxpr.invars]


def test_an_axis_of_one_element_is_tiled_by_a_view() -> None:
    """Elements of a longer axis would come in another order than the axes of an array."""
    x = np.arange(12.0, dtype=np.float32).reshape(3, 1, 4)
    for reps, left in (((1, 5, 1), []), ((2, 1, 1), ["tile", "slice"])):
        f = lambda x: jnp.tile(x, reps)[:, :1][:3]  # noqa: B023
        new = SIMPLE(f)
        assert [e.primitive.name for e in jax.make_jaxpr(new)(x).eqns] == left
        np.testing.assert_array_equal(new(x), f(x))


@pytest.mark.parametrize("name", ["slice", "reshapes", "tiled"])
def test_views_that_cancel_need_no_copy(name: str) -> None:
    """The gradient of a product reads its argument in place, behind a chain of views too."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 64), (64, 2)))
    f = lambda w, x: jnp.sum(jnp.tanh(CANCEL[name](x) @ w))
    compiled = jax.jit(xform.grad(f)).lower(w, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < x.size * x.dtype.itemsize / 4


def move(x: jax.Array, at: random.Random) -> jax.Array:
    """Return a random view of `x`."""
    order = at.sample(range(x.ndim), x.ndim)
    axis = order[0] if order else 0
    if x.ndim == 0:
        return at.choice([x[None], jnp.broadcast_to(x, (3,)), x])
    shape = (x.shape[axis], -1) if x.shape[axis] else x.shape
    return at.choice([
        lambda: x.transpose(order), lambda: x.reshape(shape), lambda: x.squeeze(),
        lambda: jnp.expand_dims(x, axis), lambda: jnp.flip(x, axis),
        lambda: x.reshape(x.shape[::-1]),
        lambda: lax.slice_in_dim(x, min(1, x.shape[axis]), x.shape[axis], 1, axis),
        lambda: lax.dynamic_slice_in_dim(x, 1, x.shape[axis], axis),
        lambda: jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], 2, *x.shape[axis:])),
        lambda: jnp.stack([x], axis), lambda: jnp.tile(x, (1,) * x.ndim),
    ])()  # fmt: skip


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (1, 4, 1), (2, 3, 2), (0, 3), (2, 1, 0)])
def test_random_chains_have_the_same_elements(shape: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    fewer = 0
    for seed in range(10):

        def chain(x, seed=seed):
            at = random.Random(seed)
            for _ in range(at.randint(1, 6)):
                x = move(x, at)
            return x

        count = lambda f: sum(e.primitive.name in MOVES for e in jax.make_jaxpr(f)(x).eqns)
        simple = SIMPLE(chain)
        before, after = count(passes.Inline()(chain)), count(simple)
        assert after <= before
        fewer += after < before
        assert np.array_equal(simple(x), chain(jnp.asarray(x))), seed
    assert fewer > 1


def test_symbolic_dimensions_stay() -> None:
    (b,) = jax.export.symbolic_shape("b")
    f = SIMPLE(lambda x: jnp.flip(CANCEL["slice"](x).reshape(-1)[None].reshape(b, 2, 2), 1))
    exported = jax.export.export(jax.jit(f))(jax.ShapeDtypeStruct((b, 4), jnp.float32))
    y = jnp.arange(12.0).reshape(3, 4)
    assert jnp.array_equal(exported.call(y), jnp.flip(y.reshape(3, 2, 2), 1))


@pytest.mark.parametrize("name", ["slice", "swaps", "reversed"])
def test_an_explicit_sharding_stays(name: str) -> None:
    mesh = jax.make_mesh((1,), ("i",), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(48.0).reshape(6, 8), PartitionSpec(None, "i"))
        g = xform.grad(lambda x: jnp.sum(jnp.sin(CANCEL[name](x))))
        for y in (g(x), jax.jit(g)(x)):
            assert jax.typeof(y) == jax.typeof(x)
            assert jnp.allclose(y, jnp.cos(x), atol=1e-6)
