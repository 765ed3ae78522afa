"""The table of residuals against the pullback itself, and against the lines of this file."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import xform
from xform.errors import WrongArgument, WrongDtype
from xform.planner.report.residuals import Residual, ResidualTable

WS = jax.ShapeDtypeStruct((5, 8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
KEEP_ALL = xform.policies.save_everything
VALUE = 4 * 8 * 4  # bytes of one activation
HEAD = ["bytes", "values", "trips", "per trip", "type", "kind", "operation", "where", "why"]
POLICIES = {
    "save_everything": xform.policies.save_everything,
    "save_dots": xform.policies.save_dots,
    "save_nothing": xform.policies.save_nothing,
    "names": xform.policies.save_only_these_names("product"),
}


def layer(x: Any, w: Any) -> Any:
    product = checkpoint_name(x @ w, "product")  # LINE product
    return jnp.sin(product)  # LINE sin


def scanned(ws: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0].sum()


def unrolled(ws: Any, x: Any) -> Any:
    for w in ws:
        x = layer(x, w)
    return x.sum()


def nested(ws: Any, x: Any) -> Any:
    def outer(x: Any, w: Any) -> Any:
        gate = jnp.exp(x[0])  # LINE gate

        def inner(x: Any, _: Any) -> Any:
            x = layer(x, w) * gate
            return x, x

        x, all_x = lax.scan(inner, x, None, length=3)
        return x, jnp.cos(all_x).sum()

    x, sums = lax.scan(outer, x, ws)
    return x.sum() + sums.sum()


def small_jit(ws: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (jax.jit(layer)(x, w), None), x, ws)[0].sum()


def large_jit(ws: Any, x: Any) -> Any:
    @jax.jit
    def block(x: Any, w: Any) -> Any:
        for _ in range(30):
            x = jnp.sin(x) * 2
        return layer(x, w)

    return lax.scan(lambda x, w: (block(x, w), None), x, ws)[0].sum()


def region(ws: Any, x: Any) -> Any:
    block = xform.remat(layer, policy=xform.policies.save_dots)
    return lax.scan(lambda x, w: (block(x, w), None), x, ws)[0].sum()


@jax.custom_vjp
def swish(x: Any) -> Any:
    return x * jax.nn.sigmoid(x)


swish.defvjp(
    lambda x: (x * jax.nn.sigmoid(x), jnp.exp(-x)),
    lambda e, ct: (ct * e,),  # not the derivative: what it keeps is the point
)


def custom(ws: Any, x: Any) -> Any:
    def step(x: Any, w: Any) -> Any:
        return swish(x @ w), None  # LINE swish

    return lax.scan(step, x, ws)[0].sum()


def branches(ws: Any, x: Any) -> Any:
    def step(x: Any, w: Any) -> Any:
        return lax.cond(
            x[0, 0] > 0,
            lambda x: jnp.sin(x) * jnp.cos(x),
            lambda x: jnp.exp(x @ w) + 1,
            x,
        ), None

    return lax.scan(step, x, ws)[0].sum()


def invariant(ws: Any, x: Any) -> Any:
    def step(x: Any, _: Any) -> Any:
        scale = jnp.sin(ws[0])  # LINE scale
        return x @ scale, None

    return lax.scan(step, x, None, length=7)[0].sum()


def stacked_output(ws: Any, x: Any) -> Any:
    def step(x: Any, w: Any) -> Any:
        y = jnp.exp(x @ w)
        return y, y

    return jnp.square(lax.scan(step, x, ws)[1]).sum()


FUNCTIONS: list[Callable[..., Any]] = [
    scanned, unrolled, nested, small_jit, large_jit, region, custom, branches, invariant,
    stacked_output,
]  # fmt: skip


def line(mark: str, of: Callable[..., Any] = layer) -> int:
    """The line of this file that bears a mark."""
    lines, start = inspect.getsourcelines(inspect.getmodule(of))
    (at,) = [i for i, text in enumerate(lines) if text.rstrip().endswith(f"# LINE {mark}")]
    return max(start, 1) + at


def line_of(row: Residual) -> int:
    path, number, *_ = row.where.split(":")
    assert path == __file__
    return int(number.split(" ")[0])


def made_by(table: ResidualTable, operation: str, kind: str = "kept") -> Residual:
    (row,) = [r for r in table if (r.operation, r.kind) == (operation, kind)]
    return row


def held_bytes(f: Callable[..., Any], *args: Any, policy: Any) -> tuple[int, int]:
    """Bytes that the pullback of `f` holds: values of its own, and arguments."""
    jaxpr = jax.make_jaxpr(lambda *args: xform.vjp(f, *args, policy=policy)[1])(*args).jaxpr
    distinct = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    arguments = distinct.intersection(jaxpr.invars)
    size = lambda v: v.aval.size * v.aval.dtype.itemsize
    return sum(map(size, distinct - arguments)), sum(map(size, arguments))


@pytest.mark.filterwarnings("ignore:.*which no value has", "ignore:.*changes nothing")
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_bytes_are_those_that_the_pullback_holds(f: Any, policy: Any) -> None:
    table = xform.residuals(f, WS, X, policy=policy)
    assert (table.total_bytes, table.argument_bytes) == held_bytes(f, WS, X, policy=policy)


def test_without_views_the_leaves_of_the_pullback_are_the_rows() -> None:
    leaves = jax.tree.leaves(jax.eval_shape(lambda *a: xform.vjp(scanned, *a)[1], WS, X))
    table = xform.residuals(scanned, WS, X)
    assert (
        sum(x.size * x.dtype.itemsize for x in leaves) == table.total_bytes + table.argument_bytes
    )


@pytest.mark.parametrize("f", [scanned, small_jit])
def test_a_scan_body(f: Any) -> None:
    table = xform.residuals(f, WS, X)
    cos, carry = made_by(table, "cos"), made_by(table, "sin", "carry")
    assert line_of(cos) == line_of(carry) == line("sin")
    assert "(layer)" in cos.where
    for row in (cos, carry):
        assert (row.type, row.trip_bytes, row.trips) == ("float32[4,8]", VALUE, 5)
    assert table.total_bytes == 2 * 5 * VALUE
    (argument,) = [r for r in table if r.kind == "argument"]
    assert (argument.operation, argument.total_bytes) == ("ws", 5 * 8 * 8 * 4)
    assert table.argument_bytes == argument.total_bytes


@pytest.mark.parametrize("policy", ["save_dots", "names"])
@pytest.mark.parametrize("f", [scanned, unrolled, small_jit])
def test_a_named_product(f: Any, policy: str) -> None:
    rows = [r for r in xform.residuals(f, WS, X, policy=POLICIES[policy])
            if r.operation == "dot_general"]  # fmt: skip
    assert sum(r.total_bytes for r in rows) == 5 * VALUE
    for row in rows:
        assert (row.name, line_of(row)) == ("product", line("product"))
        wanted = "save_dots saves dot_general" if policy == "save_dots" else "saves product"
        assert row.why.endswith(wanted)


def test_nothing_but_the_state_of_the_loop() -> None:
    (row,) = [r for r in xform.residuals(scanned, WS, X, policy=POLICIES["save_nothing"])
              if r.kind != "argument"]  # fmt: skip
    assert (row.kind, row.operation, row.trips) == ("carry", "sin", 5)
    assert not xform.residuals(unrolled, WS, X, policy=POLICIES["save_nothing"]).total_bytes


def test_nested_scans_multiply_their_trips() -> None:
    table = xform.residuals(nested, WS, X, policy=KEEP_ALL)
    inside = made_by(table, "cos")
    assert (inside.loops, inside.trips, inside.total_bytes) == ((5, 3), 15, 15 * VALUE)
    assert line_of(inside) == line("sin")
    gate = made_by(table, "exp")
    assert (gate.loops, gate.trip_bytes, line_of(gate)) == ((5,), 8 * 4, line("gate"))


def test_a_remat_region_keeps_the_residuals_of_its_policy() -> None:
    table = xform.residuals(region, WS, X)
    row = made_by(table, "dot_general")
    assert (row.trips, line_of(row), row.why) == (5, line("product"), "save_dots saves dot_general")
    assert table.total_bytes == 2 * 5 * VALUE


def test_a_custom_rule_residual_has_the_line_of_the_call() -> None:
    row = made_by(xform.residuals(custom, WS, X), "exp")
    assert (row.trips, line_of(row)) == (5, line("swish"))


def test_branches_share_their_slots() -> None:
    table = xform.residuals(branches, WS, X, policy=KEEP_ALL)
    assert {r.kind for r in table} == {"kept", "shared", "carry", "argument"}
    whole = sum(r.total_bytes for r in table if r.kind != "argument")
    assert table.total_bytes == whole - sum(r.total_bytes for r in table if r.kind == "shared")


def test_a_loop_invariant_residual_is_kept_once() -> None:
    row = made_by(xform.residuals(invariant, WS, X, policy=KEEP_ALL), "sin")
    assert (row.loops, row.trips, line_of(row)) == ((), 1, line("scale"))


def test_an_output_that_is_kept_inside_is_one_value() -> None:
    rows = [r for r in xform.residuals(stacked_output, WS, X) if r.operation == "exp"]
    assert sorted(r.kind for r in rows) == ["carry", "kept"]


def test_offloaded_values_say_where_they_wait() -> None:
    policy = xform.policies.offload_dots_with_no_batch_dims("device", "pinned_host")
    row = made_by(xform.residuals(scanned, WS, X, policy=policy), "dot_general")
    assert row.memory == "pinned_host"
    assert "kept in pinned_host" in str(xform.residuals(scanned, WS, X, policy=policy))


def test_arrays_trees_auxiliary_outputs_and_held_arguments() -> None:
    def loss(params: Any, batch: Any, mode: str) -> Any:
        assert mode == "train"
        hidden = jnp.sin(batch @ params["w"])
        return hidden.sum(), {"hidden": jnp.exp(hidden)}

    params = {"w": jnp.ones((8, 8)), "unused": jnp.ones(3)}
    for batch in (X, jnp.ones((4, 8))):
        table = xform.residuals(loss, params, batch, "train", argnums=0, has_aux=True)
        assert made_by(table, "cos").total_bytes == table.total_bytes == VALUE
        (argument,) = [r for r in table if r.kind == "argument"]
        assert argument.operation == "batch"
    both = xform.residuals(lambda p, x: loss(p, x, "train")[0], params, X)
    assert {r.operation for r in both if r.kind == "argument"} == {"p['w']", "x"}


def test_nothing_is_allocated() -> None:
    huge = jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32)
    table = xform.residuals(lambda x: jnp.sin(x).sum(), huge, policy=KEEP_ALL)
    assert table.total_bytes == 2**34


def test_residuals_table_as_text_and_as_a_dict() -> None:
    table = xform.residuals(scanned, WS, X, policy=POLICIES["names"])
    title, head, *rows, total = str(table).splitlines()
    assert title == "kept for the backward pass of scanned, save_only_these_names:product"
    assert re.split("  +", head.strip()) == HEAD
    assert "dot_general 'product'" in rows[0] + rows[1]
    assert f"test_residuals.py:{line('product')}" in rows[0] + rows[1]
    assert total == "1.2 KiB kept, 1.2 KiB of arguments read in place"
    data = table.to_dict()
    assert data["total_bytes"] == table.total_bytes == 10 * VALUE
    assert [r["total_bytes"] for r in data["rows"]] == [r.total_bytes for r in table]
    assert len(table) == 3


def test_rows_are_sorted_and_equal_ones_are_one_line() -> None:
    table = xform.residuals(unrolled, WS, X, policy=KEEP_ALL)
    kept = [r.total_bytes for r in table if r.kind == "kept"]
    assert kept == sorted(kept, reverse=True)
    assert len(str(table).splitlines()) < len(table)
    (cosines,) = [text for text in str(table).splitlines() if " cos " in text]
    assert cosines.split()[:3] == ["640", "B", "5"]


def test_nothing_kept_and_nothing_read() -> None:
    table = xform.residuals(lambda x: 2 * x, X)
    assert (len(table), table.total_bytes) == (0, 0)
    assert str(table).endswith("0 B kept, 0 B of arguments read in place")


def test_errors() -> None:
    with pytest.raises(WrongArgument, match="is not callable"):
        xform.residuals(3, X)  # type: ignore[arg-type]
    with pytest.raises(WrongArgument, match="residuals with argnums=2"):
        xform.residuals(jnp.sin, X, argnums=2)
    with pytest.raises(WrongDtype, match="type str is not an array"):
        xform.residuals(jnp.sin, "x")
    with pytest.raises(WrongArgument, match="no policy has the name 'dots'"):
        xform.residuals(jnp.sin, X, policy="dots")
