"""Values that are sharded over explicit mesh axes are sliced within their shards."""

from __future__ import annotations

import re
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
from tests.sharding import mesh
from xform.errors import UnknownShardings
from xform.planner.sliced.loss import run_loss_in_slices
from xform.program.fingerprint import listing
from xform.program.ir import evaluate, trace
from xform.slices.opened import opened
from xform.slices.region import find_region
from xform.slices.resize import CurrentSlice
from xform.slices.rewrite import with_loop
from xform.slices.shards import merge, split

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="a mesh of eight devices")
GATHERS = "all-gather", "all-to-all", "collective-permute"

WORDS = 2048


def explicit() -> Any:
    return mesh(AxisType.Explicit, data=4, model=2)


def on(where: Any, x: Any, *spec: Any) -> Any:
    return jax.device_put(jnp.asarray(x), NamedSharding(where, P(*spec)))


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype("float32") / 4


def figures(f: Callable[..., Any], *args: Any) -> tuple[int, list[int]]:
    """Return the bytes of a compiled function on each device, and its gathers."""
    f = f if hasattr(f, "lower") else jax.jit(f)
    compiled = f.lower(*args).compile()
    memory: Any = compiled.memory_analysis()
    ends = memory.argument_size_in_bytes + memory.output_size_in_bytes
    total = ends + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return total, [
        len(re.findall(rf" {kind}(?:-start)?\(", compiled.as_text())) for kind in GATHERS
    ]


def largest(prog: Any) -> Any:
    made: list[Any] = [y for e in prog.equations for y in e.outvars]
    return max(made, key=lambda v: v.aval.size)


def loss(w: Any, h: Any, y: Any) -> Any:
    """Return the cross-entropy of words that are sharded over the devices."""
    logits = jnp.einsum("btd,dv->btv", jnp.tanh(h), w)
    words = jax.nn.one_hot(y, WORDS)
    if not jax.typeof(logits).sharding.mesh.empty:
        words = jax.sharding.reshard(words, jax.typeof(logits).sharding)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(words * logits, -1))


def data(where: Any, batch: str, words: str | None) -> tuple[Any, ...]:
    y = np.random.default_rng(1).integers(0, WORDS, (16, 64)).astype("int32")
    return on(where, normal(32, WORDS), None, words), on(where, normal(16, 64, 32), batch), on(
        where, y, batch)  # fmt: skip


def close(got: Any, want: Any) -> None:
    """Compare up to the rounding of sums, which are as exact as their largest term."""

    def check(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())

    jax.tree.map(check, got, want)


def test_slices_of_each_shard() -> None:
    """Slice i has part i of each shard, and the slices together have every index once."""
    with jax.set_mesh(explicit()):
        x = on(explicit(), np.arange(48.0), "data")
        parts = [CurrentSlice(jnp.int32(i), 3).cut(x, 0) for i in range(3)]
        np.testing.assert_array_equal(
            parts[1], [4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31, 40, 41, 42, 43]
        )
        assert sorted(np.concatenate(parts)) == list(range(48))
        assert jax.typeof(parts[0]).sharding.spec == P("data")
        np.testing.assert_array_equal(merge(split(x, 0, 3), 0), x)


@pytest.mark.parametrize(("axis", "n"), [(0, 4), (1, 8), (2, 2)])
@pytest.mark.parametrize("output", ["loss", "values"])
def test_every_axis_without_a_gather(axis: int, n: int, output: str) -> None:
    """Axis 0 is sharded over `data`, axis 2 over `model`, and axis 1 is not sharded."""
    values = lambda w, h, y: jnp.sin(jnp.einsum("btd,dv->btv", jnp.tanh(h), w)) * 2
    f = loss if output == "loss" else values
    args = data(explicit(), "data", "model")
    with jax.set_mesh(explicit()):
        prog = opened(trace(lambda *xs: [f(*xs)], *args))
        region = find_region(prog, largest(prog), axis, n)
        assert region is not None
        new = with_loop(region, run_loss_in_slices)
        g = lambda *xs: evaluate(new, xs)[0]
        assert jax.typeof(jax.jit(g)(*args)) == jax.typeof(jax.jit(f)(*args))
        close(jax.jit(g)(*args), jax.jit(f)(*args))
        of_slices, of_whole = figures(g, *args), figures(f, *args)
        assert of_slices[1] == of_whole[1]
        if axis < 2:
            assert of_slices[0] < 0.7 * of_whole[0]
        scalar = lambda f: lambda *xs: jnp.sum(f(*xs) ** 2)
        close(jax.jit(jax.grad(scalar(g), (0, 1)))(*args), jax.grad(scalar(f), (0, 1))(*args))


def test_the_loop_does_not_depend_on_the_current_mesh() -> None:
    """A step is planned after its trace, outside of the mesh that it enters, and traced again."""
    args = normal(32, WORDS), normal(16, 64, 32), np.zeros((16, 64), "int32")
    automatic = mesh(AxisType.Auto, data=8).abstract_mesh
    with jax.sharding.use_abstract_mesh(automatic):
        prog = opened(trace(lambda *xs: [loss(*xs)], *args))

    def rewritten() -> tuple[str, ...]:
        region = find_region(prog, largest(prog), 0, 4)
        assert region is not None
        return listing(with_loop(region, run_loss_in_slices))

    outside = rewritten()
    with jax.sharding.use_abstract_mesh(automatic):
        assert rewritten() == outside


def test_a_length_that_the_shards_do_not_leave() -> None:
    """16 rows in 4 shards have at most 4 slices, and numbers of an iota differ between shards."""
    with jax.set_mesh(explicit()):
        x = on(explicit(), normal(16, 8), "data")

        def names(f: Any, n: int) -> set[str]:
            prog = opened(trace(lambda x: [f(x)], x))
            region = find_region(prog, prog.inputs[0], 0, n)
            return {e.primitive.name for e, _ in region.equations} if region else set()

        assert "sin" in names(lambda x: jnp.sum(jnp.sin(x)), 4)
        assert names(lambda x: jnp.sum(jnp.sin(x)), 8) == set()

        def numbered(x: Any) -> Any:
            rows = lax.broadcasted_iota("float32", (16, 8), 0, out_sharding=P("data", None))
            return jnp.sum(jnp.sin(x) * rows)

        assert "iota" not in names(numbered, 4)
        resharded = lambda x: jnp.sum(jnp.sin(jax.sharding.reshard(x, P(None, "data"))))
        assert "reshard" not in names(resharded, 4)


def test_a_function_and_a_budget_in_slices() -> None:
    args = data(explicit(), "data", "model")
    with jax.set_mesh(explicit()):
        whole, gathers = figures(loss, *args)
        of_gradient = figures(jax.grad(loss), *args)[0]
    small = xform.sliced(loss, whole // 2)
    with jax.set_mesh(explicit()):
        total, of_small = figures(small, *args)
        assert total <= whole // 2
        assert of_small == gathers
        plan = xform.plan(loss, *args, policy=f"slices:budget:{of_gradient // 2}")
        assert "value and gradient in one loop" in plan.sliced_regions[0]
        total, of_plan = figures(xform.grad(loss, policy=plan), *args)
        assert total == plan.compiled_bytes
        assert of_plan == figures(jax.grad(loss), *args)[1]
        close(jax.jit(xform.grad(loss, policy=plan))(*args), jax.grad(loss)(*args))
    close(small(*args), loss(*args))


def check_step_in_slices(loss: Any, args: Any, slices: str) -> None:
    """Check that a step within half of its bytes runs in slices, and gathers nothing new."""

    def step(lib: Any) -> Any:
        def step(w: Any, h: Any, y: Any) -> Any:
            value, g = lib.value_and_grad(loss)(w, h, y)
            return w - 0.1 * g, value

        return step

    whole, gathers = figures(step(jax), *args)
    small = xform.jit(step(xform), f"slices:budget:{whole // 2}")
    close(small(*args), jax.jit(step(jax))(*args))
    (plan,) = small.plan.plans.values()
    assert slices in plan.sliced_regions[0]
    total, of_slices = figures(small, *args)
    assert total == small.plan.compiled_bytes
    assert total <= whole // 2
    assert of_slices == gathers


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_step_gathers_nothing_new(kind: AxisType) -> None:
    """On a mesh of `Auto` axes, slices of the sharded batch would take fewer bytes and gather."""
    args = data(mesh(kind, data=8), "data", None)
    check_step_in_slices(loss, args, "slices of axis")


def test_a_function_on_auto_axes_is_an_error() -> None:
    args = data(mesh(AxisType.Auto, data=8), "data", None)
    with pytest.raises(UnknownShardings, match=r"Auto axes {'data': 8}[\s\S]*xform\.jit"):
        xform.sliced(loss, "1 MiB")(*args)
