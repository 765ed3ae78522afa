"""Over Auto axes, sharding constraints tell how an axis is sharded: each shard is sliced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.sharding import mesh
from tests.slices.test_shards import check_step_in_slices, close, figures, largest, normal
from xform.planner.sliced.loss import run_loss_in_slices
from xform.program.ir import evaluate, trace
from xform.slices.opened import opened
from xform.slices.region import find_region
from xform.slices.resize import CurrentSlice
from xform.slices.rewrite import with_loop

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="a mesh of eight devices")

ROWS, TOKENS, WIDTH, WORDS = 256, 8, 64, 1024


def auto() -> Any:
    return mesh(AxisType.Auto, data=4, model=2)


def over(x: Any, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(auto(), P(*spec)))


def loss(w: Any, h: Any, y: Any) -> Any:
    """Return the cross-entropy of rows that are sharded over all devices."""
    h = over(jnp.tanh(h), ("data", "model"), None, None)
    logits = over(jnp.einsum("btd,dv->btv", h, w), ("data", "model"), None, None)
    words = jax.nn.one_hot(y, WORDS)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(words * logits, -1))


def placed(rows: int = ROWS) -> tuple[Any, ...]:
    put = lambda x, *spec: jax.device_put(x, NamedSharding(auto(), P(*spec)))
    y = np.random.default_rng(1).integers(0, WORDS, (rows, TOKENS)).astype("int32")
    batch = "data", "model"
    return put(normal(WIDTH, WORDS)), put(normal(rows, TOKENS, WIDTH), batch), put(y, batch)


def region_of(f: Any, args: Any, n: int) -> Any:
    prog = opened(trace(lambda *xs: [f(*xs)], *args))
    return find_region(prog, largest(prog), 0, n)


def test_a_slice_has_a_part_of_each_shard() -> None:
    x = jnp.arange(48)
    parts = [CurrentSlice(jnp.int32(i), 3, 4).cut(x, 0) for i in range(3)]
    np.testing.assert_array_equal(
        parts[1], [4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31, 40, 41, 42, 43]
    )
    places = CurrentSlice(jnp.int32(1), 3, 4).place(jnp.arange(16), 48)
    np.testing.assert_array_equal(parts[1], places)


@pytest.mark.parametrize("output", ["loss", "values"])
def test_no_value_is_gathered(output: str) -> None:
    values = lambda w, h, y: 2 * over(jnp.einsum("btd,dv->btv", jnp.tanh(h), w), ("data", "model"))
    f = loss if output == "loss" else values
    args = placed()
    region = region_of(f, args, 4)
    assert (region.n, region.shards) == (4, 8)
    new = with_loop(region, run_loss_in_slices)
    g = lambda *xs: evaluate(new, xs)[0]
    close(jax.jit(g)(*args), jax.jit(f)(*args))
    of_slices, of_whole = figures(g, *args), figures(f, *args)
    assert of_slices[1] == of_whole[1]
    assert of_slices[0] <= of_whole[0]
    scalar = lambda f: lambda *xs: jnp.sum(f(*xs) ** 2)
    close(jax.jit(jax.grad(scalar(g), (0, 1)))(*args), jax.grad(scalar(f), (0, 1))(*args))


def test_each_slice_has_rows_of_every_device() -> None:
    """256 rows on 8 devices have at most 32 slices; fewer rows would leave devices without work."""
    assert region_of(loss, placed(), 64) is None
    assert region_of(loss, placed(16), 4) is None
    assert region_of(loss, placed(16), 2).shards == 8
    whole = lambda w, h, y: jnp.sum(jnp.tanh(jnp.einsum("btd,dv->btv", h, w)))
    assert region_of(whole, placed(), 64).shards == 1


def test_numbers_of_rows_and_draws() -> None:
    """The numbers of an iota and random bits are those of the slice's own rows."""

    def f(key: Any, h: Any) -> Any:
        h = over(jax.nn.relu(h), ("data", "model"), None, None)
        rows = lax.broadcasted_iota("float32", h.shape, 0)
        return jnp.sum(jnp.sin(h * rows) * jax.random.bernoulli(key, 0.5, h.shape), 0)

    key, h = jax.random.key(0), placed()[1]
    region = region_of(f, (key, h), 4)
    assert {"iota", "random_bits"} <= {eqn.primitive.name for eqn, _ in region.equations}
    new = with_loop(region, run_loss_in_slices)
    close(jax.jit(lambda *xs: evaluate(new, xs)[0])(key, h), jax.jit(f)(key, h))


def test_a_step_within_a_budget() -> None:
    """The slices of a step gather nothing that the step does not gather, and use all devices."""
    check_step_in_slices(loss, placed(), "slices of axis 0")
