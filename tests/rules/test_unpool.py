"""The cotangent of pooled windows goes where JAX's own operation sends it, in fewer bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import xform
from xform._jax import jax_primitives
from xform.program.ir import trace
from xform.rules.unpool import lowered, unpool, unpool_p

RNG = np.random.default_rng(5)
WINDOWS = {
    "apart": ((2, 2), (2, 2), "VALID"),
    "apart, a rest": ((2, 3), (2, 3), "VALID"),
    "apart, padded": ((3, 2), (3, 2), ((1, 2), (1, 0))),
    "with gaps": ((2, 1), (3, 2), "SAME"),
    "overlapping": ((3, 3), (2, 2), "SAME"),
    "overlapping twice": ((5, 4), (2, 1), ((2, 2), (0, 3))),
    "sliding": ((3, 2), (1, 1), "SAME"),
    "of one": ((1, 1), (1, 1), "VALID"),
    "of all": ((9, 8), (1, 1), "VALID"),
}


def pooled(window, reducer=lax.max, init=-np.inf):
    return lambda x: lax.reduce_window(x, np.asarray(init, x.dtype), reducer, *window)


def check(f, x: np.ndarray, tolerance: float = 0.0) -> None:
    """Check that the gradient of a weighted sum of the pooled value is JAX's."""
    weight = jnp.asarray(RNG.permutation(np.linspace(0.5, 2, f(x).size)).reshape(f(x).shape))
    loss = lambda x: jnp.sum(f(x).astype("float32") * weight)
    for transform in (lambda g: g, jax.jit):
        ours, theirs = transform(xform.grad(loss))(x), jax.grad(loss)(x)
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(
            np.asarray(ours, "float32"), np.asarray(theirs, "float32"), tolerance, tolerance
        )


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("values", ["all different", "ties", "equal"])
def test_pooling_cotangents_go_to_the_same_elements_as_in_jax(window, values: str) -> None:
    x = RNG.permutation(np.linspace(-2, 2, 72)).astype("float32").reshape(9, 8)
    x = {"all different": x, "ties": np.round(x), "equal": 0 * x}[values]
    check(pooled(window), x, 1e-6)
    check(pooled(window, lax.min, np.inf), x, 1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_of_16_bits(dtype: str) -> None:
    x = jnp.asarray(RNG.permutation(72).reshape(9, 8), dtype)
    check(pooled(WINDOWS["overlapping"]), x, 1e-2)
    check(pooled(WINDOWS["apart, a rest"]), x)


def test_nan_and_infinities_in_windows_are_selected_as_in_xla() -> None:
    """NaN and infinities are chosen or skipped as in XLA's operation."""
    x = np.array([[1, np.nan, 2, 2], [np.nan, 3, -np.inf, -np.inf]] * 2, "float32")
    ct = np.arange(1.0, 5, dtype="float32").reshape(2, 2)
    windows = dict(window_dimensions=(2, 2), window_strides=(2, 2), padding=((0, 0), (0, 0)))
    for select in (lax.ge_p, lax.le_p):
        ours = unpool(ct, x, select_prim=select, **windows)
        theirs = jax_primitives.select_and_scatter_add_p.bind(ct, x, select_prim=select, **windows)
        np.testing.assert_array_equal(ours, theirs)


def test_with_negative_padding() -> None:
    """JAX has no gradient for this; the reference crops first."""
    x = RNG.permutation(np.linspace(-2, 2, 72)).astype("float32").reshape(9, 8)
    cropped = pooled(((2, 2), (1, 2), ((-1, 1), (1, -2))))
    by_hand = pooled(((2, 2), (1, 2), ((0, 1), (1, 0))))
    ours = xform.grad(lambda x: jnp.sum(cropped(x) ** 2))(x)
    theirs = jax.grad(lambda x: jnp.sum(by_hand(x[1:, :-2]) ** 2))(x)
    np.testing.assert_allclose(ours, theirs, 1e-6)


def test_of_images_in_a_batch_and_of_lines() -> None:
    x = RNG.normal(size=(2, 6, 5, 3)).astype("float32")
    check(pooled(((1, 3, 2, 1), (1, 2, 2, 1), "SAME")), x, 1e-6)
    check(pooled(((3,), (2,), "SAME")), x[0, 0, :, 0], 1e-6)
    check(jax.vmap(pooled(((2, 2), (2, 2), "VALID")), in_axes=2, out_axes=2), x[..., 0])
    check(pooled(((2, 2), (2, 2), "VALID")), np.zeros((0, 4), "float32"))


def test_its_own_derivatives() -> None:
    """It is linear in the cotangent, under JAX's and xform's transforms, and batched."""
    f = pooled(WINDOWS["overlapping"])
    x = RNG.permutation(np.linspace(-2, 2, 72)).astype("float32").reshape(9, 8)
    loss = lambda x: jnp.sum(f(x) ** 3)
    v = jnp.cos(jnp.arange(72.0).reshape(9, 8))
    theirs = jax.jvp(jax.grad(loss), (x,), (v,))[1]
    again = lambda grad: lambda x: jnp.vdot(grad(loss)(x), v)
    for ours in (
        xform.jvp(xform.grad(loss), (x,), (v,))[1],
        xform.grad(again(xform.grad))(x),
        jax.jvp(xform.grad(loss), (x,), (v,))[1],
        jax.grad(again(xform.grad))(x),
        jax.jit(jax.vmap(lambda x, v: xform.jvp(xform.grad(loss), (x,), (v,))[1]))(
            jnp.stack([x, -x]), jnp.stack([v, v]))[0],
    ):  # fmt: skip
        np.testing.assert_allclose(ours, theirs, 1e-5, 1e-5)


def test_max_pool_gradient_takes_under_a_tenth_of_jax_temp_bytes() -> None:
    """On a CPU XLA makes a dozen arrays for its own operation."""
    f = pooled(((1, 2, 2, 1), (1, 2, 2, 1), "VALID"))
    loss, x = (lambda x: jnp.sum(f(x) ** 2)), jax.ShapeDtypeStruct((16, 32, 32, 32), "float32")
    ours, theirs = (
        jax.jit(grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes
        for grad in (xform.grad, jax.grad)
    )
    assert ours < theirs / 10


def test_large_windows_are_left_to_xla() -> None:
    jaxpr = jax.make_jaxpr(xform.grad(lambda x: jnp.sum(pooled(((9, 8), (1, 1), "SAME"))(x))))
    text = str(jaxpr(jnp.ones((20, 20))))
    assert "select_and_scatter_add" in text
    assert "xform_unpool" not in text


def test_windows_of_a_sharded_array_are_left_to_jax() -> None:
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Explicit,), devices=jax.devices()[:2])
    loss = lambda x: jnp.sum(pooled(((1, 2, 2), (1, 2, 2), "VALID"))(x))
    programs = []
    for spec in (PartitionSpec(), PartitionSpec("i")):
        with jax.set_mesh(mesh):
            x = jax.device_put(jnp.ones((4, 6, 6)), NamedSharding(mesh, spec))
            prog = trace(lambda x: [xform.grad(loss)(x)], x)
        (eqn,) = [e for e in prog.equations if e.primitive is unpool_p]
        programs.append(lowered(eqn))
    assert programs[0] is not None
    assert programs[1] is None
