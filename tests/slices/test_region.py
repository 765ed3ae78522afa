"""Which equations form a region, which values enter and leave it, and what ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xform
from xform.program.ir import Program, trace
from xform.slices.opened import opened
from xform.slices.region import Region, find_region


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def program_of(f: Callable[..., Any], *args: Any) -> Program:
    leaves, tree = jax.tree.flatten(args)
    return opened(trace(lambda *xs: jax.tree.leaves(f(*jax.tree.unflatten(tree, xs))), *leaves))


def around_largest(f: Callable[..., Any], *args: Any, axis: int = 0, n: int = 2) -> Region | None:
    """Return the region around the largest value of a program, along one of its axes."""
    prog = program_of(f, *args)
    values = [y for eqn in prog.equations for y in eqn.outvars]
    return find_region(prog, max(values, key=lambda v: v.aval.size), axis, n)


def names(region: Region | None) -> set[str]:
    return {eqn.primitive.name for eqn, _ in region.equations} if region else set()


def leaves(region: Region | None) -> list[tuple[tuple[int, ...], int | None]]:
    """Return shape and axis of each output of a region."""
    assert region is not None
    return [(y.aval.shape, axis) for y, _, axis in region.outputs]


def enters(region: Region | None) -> tuple[list[Any], list[Any]]:
    assert region is not None
    return [(v.aval.shape, a) for v, a in region.sliced], [v.aval.shape for v in region.full]


def cross_entropy(h: Any, w: Any, y: Any) -> Any:
    logits = h @ w
    picked = jnp.take_along_axis(logits, y[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def kernel(x: Any, y: Any, w: Any) -> Any:
    return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ w


def attention(h: Any, w: Any) -> Any:
    q, k, v = jnp.split(h @ w, 3, -1)
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k), -1)
    return jnp.einsum("bts,bsd->btd", scores, v)


def test_a_loss_of_rows_leaves_as_a_sum() -> None:
    region = around_largest(cross_entropy, f32(16, 4), f32(4, 64), i32(16))
    assert leaves(region) == [((), None)]
    assert enters(region) == ([((16, 4), 0), ((16,), 0)], [(4, 64)])


def test_rows_and_columns_of_a_kernel() -> None:
    args = f32(16, 4), f32(32, 4), f32(32)
    assert leaves(around_largest(kernel, *args, axis=0)) == [((16,), 0)]
    columns = around_largest(kernel, *args, axis=1)
    assert leaves(columns) == [((16,), None)]
    assert enters(columns)[0] == [((32, 4), 0), ((32,), 0)]
    coordinates = around_largest(kernel, *args, axis=2)
    assert leaves(coordinates) == [((16, 32), None)]
    assert "exp" not in names(coordinates)


def test_one_argument_in_slices_and_in_full() -> None:
    """The pairs of all particles: a row reads its own particle and all particles."""
    energy = lambda x: jnp.sum(jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, -1)))
    for make in (lambda x: x, jnp.tanh):
        region = around_largest(lambda x, make=make: energy(make(x)), f32(16, 4))
        assert leaves(region) == [((), None)]
        assert enters(region) == ([((16, 4), 0)], [(1, 16, 4)])


@pytest.mark.parametrize(("axis", "leaves_as"), [(0, [((4, 8, 2), 0)]), (1, [((4, 8, 2), 1)])])
def test_batch_and_queries_of_attention(axis: int, leaves_as: Any) -> None:
    region = around_largest(attention, f32(4, 8, 2), f32(2, 6), axis=axis)
    assert {"exp", "dot_general"} <= names(region)
    assert leaves(region) == leaves_as


def test_keys_of_attention_end_at_the_softmax() -> None:
    region = around_largest(attention, f32(4, 8, 2), f32(2, 6), axis=2)
    assert not names(region) & {"reduce_max", "reduce_sum"}


def test_a_merged_axis_is_sliced_along_its_slowest_factor() -> None:
    f = lambda x, w: jnp.tanh(jnp.tanh(x.reshape(-1, 4) @ w).reshape(8, 6, 32)).sum()
    args = f32(8, 6, 4), f32(4, 32)
    assert enters(around_largest(f, *args, n=4))[0] == [((8, 6, 4), 0)]
    prog = program_of(f, *args)
    split = next(e.outvars[0] for e in prog.equations if e.outvars[0].aval.shape == (8, 6, 32))
    assert names(find_region(prog, split, 1, 2)) == {"tanh", "reduce_sum"}  # the fast factor


def test_lengths_that_n_does_not_divide_stay_outside() -> None:
    f = lambda x, w: jnp.sum(jnp.tanh(jnp.sin(x).reshape(-1, 4) @ w))
    prog = program_of(f, f32(3, 4, 4), f32(4, 32))
    product = next(e.outvars[0] for e in prog.equations if e.primitive.name == "dot_general")
    assert "sin" in names(find_region(prog, product, 0, 3))
    assert "sin" not in names(find_region(prog, product, 0, 6))
    assert find_region(prog, product, 0, 5) is None


def test_loops_branches_and_rules_are_looked_into() -> None:
    def f(x: Any, ws: Any) -> Any:
        h = lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, ws)[0]
        h = lax.cond(ws[0, 0, 0] > 0, jnp.sin, lambda h: h * 2, h)
        h = jax.checkpoint(jax.jit(jnp.cos))(h)
        return lax.fori_loop(0, 3, lambda i, h: h + i, h).sum()

    region = around_largest(f, f32(64, 4), f32(3, 4, 4))
    assert {"scan", "cond", "cos", "reduce_sum"} <= names(region)
    assert leaves(region) == [((), None)]


def test_a_second_value_of_the_same_rows_is_a_member_too() -> None:
    def f(x: Any, w: Any, v: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w) * jnp.sin(x @ v))

    region = around_largest(f, f32(16, 4), f32(4, 32), f32(4, 32))
    assert [e.primitive.name for e, _ in region.equations].count("dot_general") == 2  # pyright: ignore[reportOptionalMemberAccess]


def test_random_numbers_of_one_key_are_drawn_in_slices() -> None:
    def f(key: Any, x: Any) -> Any:
        return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.sin(x), 0))

    assert {"random_bits", "sin"} <= names(around_largest(f, jax.random.key(0), f32(16, 4)))


def test_random_numbers_of_several_keys_are_drawn_before() -> None:
    def f(keys: Any, x: Any) -> Any:
        masks = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)
        return jnp.sum(jnp.where(masks, jnp.sin(x), 0))

    region = around_largest(f, jax.random.split(jax.random.key(0), 16), f32(16, 4))
    assert "sin" in names(region)
    assert not names(region) & {"random_bits", "threefry2x32"}


def scanned_layers(ws: Any, keys: Any, x: Any) -> Any:
    """Each layer reads a random key: it scales all rows by one number."""

    def layer(h: Any, w_key: Any) -> tuple[Any, None]:
        w, key = w_key
        return jnp.tanh(h @ w) * (1 + jax.random.uniform(key, w.shape[1:])), None

    return jnp.sum(lax.scan(layer, x, (ws, keys))[0] ** 2)


def test_a_loop_with_random_keys_is_a_member() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    region = around_largest(scanned_layers, f32(3, 4, 4), keys, f32(64, 4))
    assert "scan" in names(region)
    assert leaves(region) == [((), None)]


def test_a_gradient_through_a_loop_with_random_keys() -> None:
    keys, x = jax.random.split(jax.random.key(0), 3), jnp.ones((256, 32))
    args = jax.random.normal(jax.random.key(1), (3, 32, 32)), keys, x
    policy = xform.policies.budget("300 kB", slices=True)
    plan = xform.plan(scanned_layers, *args, policy=policy)
    assert plan.sliced_regions
    assert plan.recompute_flops == 0
    want = jax.jit(jax.grad(scanned_layers))(*args)
    got = jax.jit(xform.grad(scanned_layers, policy=plan))(*args)
    assert jnp.allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


def test_find_region_takes_linear_time_and_allocates_no_arrays() -> None:
    def f(h: Any, w: Any) -> Any:
        for _ in range(300):
            h = jnp.tanh(h @ w)
        return h.sum()

    prog = program_of(f, f32(1 << 20, 1 << 14), f32(1 << 14, 1 << 14))
    start = time.process_time()
    region = find_region(prog, prog.equations[100].outvars[0], 0, 1024)
    assert time.process_time() - start < 2
    assert region is not None
    assert len(region.members) == 601


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: xform.value_and_grad(f)(*args)


def test_a_gradient_in_slices_recomputes_nothing() -> None:
    """The value is a sum, and so is the gradient of the weights."""
    f = lambda w, h, y: cross_entropy(h, w, y)
    region = around_largest(gradient(f), f32(4, 64), f32(16, 4), i32(16))
    assert set(leaves(region)) == {((), None), ((64, 4), None)} or set(leaves(region)) == {
        ((), None), ((4, 64), None)}  # fmt: skip


def moe(x: Any, router: Any, w: Any) -> Any:
    """Tokens go to the expert of their largest score, at most four to each."""
    expert = jnp.argmax(x @ router, -1)
    place = jnp.cumsum(jax.nn.one_hot(expert, 4), 0) * jax.nn.one_hot(expert, 4)
    kept = place * (place <= 4)
    return jnp.einsum("te,td,edf->tf", kept, x, w)


CONV = ("NWC", "WIO", "NWC")

# Programs, an axis, and the primitives that need the whole axis: no region may contain them.
ENDS: dict[str, tuple[Callable[..., Any], Sequence[Any], int, set[str]]] = {
    "softmax over the axis": (
        lambda x: jax.nn.softmax(jnp.sin(x), 0), [f32(16, 4)], 0, {"reduce_max"}),
    "log-sum-exp over the axis": (
        lambda x: jax.nn.logsumexp(x, 0), [f32(16, 4)], 0, {"reduce_max"}),
    "batch norm": (
        lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1), [f32(16, 4)], 0, {"sqrt"}),
    "sort": (lambda x: jnp.sort(x, 0), [f32(16, 4)], 0, {"sort"}),
    "argsort": (lambda x: jnp.argsort(x, 0), [f32(16, 4)], 0, {"sort"}),
    "cumsum": (lambda x: jnp.cumsum(x, 0), [f32(16, 4)], 0, {"cumsum"}),
    "cumulative maximum": (lambda x: lax.cummax(x, 0), [f32(16, 4)], 0, {"cummax"}),
    "maximum": (lambda x: x.max(0), [f32(16, 4)], 0, {"reduce_max"}),
    "product": (lambda x: x.prod(0), [f32(16, 4)], 0, {"reduce_prod"}),
    "argmax": (lambda x: x.argmax(0), [f32(16, 4)], 0, {"argmax"}),
    "reverse": (lambda x: x[::-1], [f32(16, 4)], 0, {"rev"}),
    "top k": (lambda x: lax.top_k(x, 2)[0], [f32(4, 16)], 1, {"top_k"}),
    "convolution along the axis": (
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=CONV),
        [f32(2, 64, 4), f32(3, 4, 4)], 1, {"conv_general_dilated"}),
    "max pooling along the axis": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME"),
        [f32(64, 4)], 0, {"reduce_window_max"}),
    "gather along the axis": (lambda x, i: x[i], [f32(16, 4), i32(8)], 0, {"gather"}),
    "scatter along the axis": (
        lambda x, i: x.at[i].set(1), [f32(16, 4), i32(8)], 0, {"scatter"}),
    "a shift along the axis": (
        lambda x: x[1:] - x[:-1], [f32(16, 4)], 0, {"slice", "sub"}),
    "one value along two axes": (
        lambda x: jnp.sin(x) @ jnp.sin(x).T @ jnp.sin(x), [f32(16, 16)], 0, set()),
    "inverse": (lambda x: jnp.linalg.cholesky(x), [f32(16, 16)], 0, {"cholesky"}),
    "fft": (lambda x: jnp.fft.fft(x, axis=0).real, [f32(16, 4)], 0, {"fft"}),
    "scan along the axis": (
        lambda x: lax.scan(lambda c, a: (c + a, c * a), jnp.zeros(4), x)[1], [f32(16, 4)], 0,
        {"scan"}),
    "a loop until all are small": (
        lambda x: lax.while_loop(lambda x: x.max() > 1, lambda x: x / 2, x), [f32(16, 4)], 0,
        {"while"}),
    "a batch of loops that end one by one": (
        jax.vmap(lambda x, n: lax.while_loop(
            lambda s: s[0] < n, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[1]),
        [f32(4, 16), i32(4)], 1, {"while"}),
    "routing with a capacity": (
        moe, [f32(16, 4), f32(4, 4), f32(4, 4, 64)], 0, {"cumsum"}),
    "side effects": (
        lambda x: [jax.debug.print("{}", x[0, 0]), jnp.sin(x)][1], [f32(16, 4)], 0,
        {"debug_print", "debug_callback"}),
    "callback": (
        lambda x: jax.pure_callback(lambda x: x, f32(16, 4), x), [f32(16, 4)], 0,
        {"pure_callback"}),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_equations_that_need_the_whole_axis_are_in_no_region(case: str) -> None:
    f, args, axis, forbidden = ENDS[case]
    prog = program_of(f, *args)
    for v in (*prog.inputs, *(y for e in prog.equations for y in e.outvars)):
        if axis < len(v.aval.shape):
            found = names(find_region(prog, v, axis, 2))
            made_along = {e.primitive.name for e in prog.equations} & forbidden
            assert not found & made_along or v.aval.shape[axis] != args[0].shape[axis], found


def test_a_loss_is_divided_by_a_count_in_the_same_loop() -> None:
    """The count depends on the weights alone, so it is there before the loop."""

    def f(h: Any, w: Any, y: Any) -> Any:
        logits = h @ w
        weights = (y > 0).astype("float32")
        rows = jax.nn.logsumexp(logits, -1) * weights
        return jnp.mean(rows * len(rows) / weights.sum())

    region = around_largest(f, f32(512, 8), f32(8, 1024), i32(512))
    assert region is not None
    assert leaves(region) == [((), None)]
    # A count that depends on the logits is not: the loss of each row leaves the loop.
    g = lambda logits: jnp.mean(jax.nn.logsumexp(logits, -1) / logits.sum())
    region = around_largest(lambda h, w: g(h @ w), f32(512, 8), f32(8, 1024))
    assert ((512,), 0) in leaves(region)


@pytest.mark.parametrize("f", [cross_entropy, kernel])
def test_other_numbers_of_slices_of_one_region(f: Any) -> None:
    args = (
        (f32(48, 8), f32(8, 96), i32(48)) if f is cross_entropy else (f32(48, 8),) * 2 + (f32(48),)
    )
    two = around_largest(f, *args)
    assert two is not None
    for n in (4, 12, 24):
        again = two.resliced(n)
        whole = find_region(two.program, two.start, two.axis, n)
        assert again is not None
        assert whole is not None
        assert (again.n, again.members, again.axes) == (n, whole.members, whole.axes)
    assert two.resliced(5) is None
