"""Meshes of the eight CPU devices, and the comparison with JAX: for the tests of sharding."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import xform

BATCH = (P("i"), P())
checked = pytest.mark.parametrize("check_vma", [True, False])
unchecked_is_slow = pytest.mark.parametrize(
    "check_vma", [True, pytest.param(False, marks=pytest.mark.slow)]
)


@functools.cache
def mesh(kind: AxisType = AxisType.Auto, **sizes: int) -> jax.sharding.Mesh:
    sizes = sizes or {"i": 8}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def inputs() -> tuple[jax.Array, jax.Array]:
    """Return a batch of eight rows, and a matrix."""
    return jnp.arange(32.0).reshape(8, 4) / 10 - 1, jnp.eye(4) + 0.1


def shard(f: Any, check_vma: bool = True, in_specs: Any = BATCH, out_specs: Any = None):
    """Map `f` over the eight devices; by default its output is the same on all of them."""
    return jax.shard_map(
        f, mesh=mesh(), in_specs=in_specs, out_specs=out_specs or P(), check_vma=check_vma
    )


def same(got: Any, wanted: Any) -> None:
    def close(a: Any, b: Any) -> None:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, 1e-10, 1e-10)

    jax.tree.map(close, got, wanted)


def types(tree: Any) -> list[str]:
    """Return shapes, dtypes and, for explicit axes, shardings."""
    return [str(jax.typeof(x)) for x in jax.tree.leaves(tree)]


def agree(f: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Check that the gradient of `f` by all arguments is JAX's; compile both at once."""
    argnums = tuple(range(len(args)))

    @jax.jit
    def both(*args: Any) -> Any:
        grads = xform.grad(f, argnums, **options)(*args), jax.grad(f, argnums)(*args)
        assert types(grads[0]) == types(grads[1])
        return grads

    same(*both(*args))


def total(x: Any) -> Any:
    return lax.psum(jnp.sum(x), "i")


def vary(w: Any, like: Any) -> Any:
    """Return `w`, varying where `like` does; under `check_vma=False` types record nothing."""
    return lax.pcast(w, "i", to="varying") if jax.typeof(like).mat.varying else w


def placed(kind: AxisType) -> tuple[jax.Array, jax.Array]:
    """Return the inputs with a sharded batch and a replicated matrix."""
    x, w = inputs()
    return (
        jax.device_put(x, NamedSharding(mesh(kind), P("i"))),
        jax.device_put(w, NamedSharding(mesh(kind), P())),
    )


def stays_where_it_is(identity: Callable[[Any], Any], kind: AxisType) -> None:
    """Check that an identity keeps the sharding of its input, and gathers nothing."""
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    at = NamedSharding(mesh(kind), P("i"))
    with jax.set_mesh(mesh(kind)):
        x = jax.device_put(jnp.arange(32.0).reshape(16, 2), at)
        compiled = jax.jit(identity).lower(x).compile()
        assert compiled(x).sharding.is_equivalent_to(at, 2)
        np.testing.assert_array_equal(compiled(x), x)
        assert "all-gather" not in compiled.as_text()
