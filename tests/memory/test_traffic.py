"""Bytes moved: cutting or updating in place counts only the part, fused or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xform
from xform.memory.traffic import moved_bytes

STACK, PART = 4096, 64


def module(*computations: list[tuple[Any, ...]]) -> Any:
    """Return a module of computations, each a list of (opcode, bytes, operands, called).

    Operands are places in the same computation. The last instruction is the root, the last
    computation the entry; parameters are numbered in order.
    """
    every: dict[int, Any] = {}
    made: dict[int, Any] = {}
    for c, lines in enumerate(computations):
        inside: list[Any] = []
        for opcode, size, operands, called in lines:
            number = sum(i.opcode == "parameter" for i in inside)
            shape = SimpleNamespace(bytes=size, elements=())
            ids = tuple(inside[o].id for o in operands)
            inside.append(SimpleNamespace(id=len(every), opcode=opcode, shape=shape, operands=ids,
                                          called=called, number=number, target=""))  # fmt: skip
            every[len(every)] = inside[-1]
        made[c] = SimpleNamespace(instructions=tuple(inside), root=inside[-1].id)
    return SimpleNamespace(instructions=every, computations=made, entry=len(made) - 1,
                           root=lambda c: every[made[c].root], trips=lambda _: 1)  # fmt: skip


CUT = [("parameter", STACK, (), ()), ("parameter", 4, (), ()), ("bitcast", STACK, (0,), ()),
       ("dynamic-slice", PART, (2, 1), ()), ("exponential", PART, (3,), ())]  # fmt: skip
UPDATE = [("parameter", STACK, (), ()), ("parameter", PART, (), ()), ("parameter", 4, (), ()),
          ("dynamic-update-slice", STACK, (0, 1, 2), ()), ("bitcast", STACK, (3,), ())]  # fmt: skip
WHOLE = [("parameter", STACK, (), ()), ("parameter", 4, (), ()),
         ("dynamic-slice", PART, (0, 1), ()), ("add", STACK, (0, 0), ())]  # fmt: skip


def around(body: list[tuple[Any, ...]], called: int) -> list[tuple[Any, ...]]:
    """Return a computation with the parameters of another one, which it calls as a fusion."""
    given = [line for line in body if line[0] == "parameter"]
    return [*given, ("fusion", body[-1][1], tuple(range(len(given))), (called,))]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("body", "moved"),
    [(CUT, 2 * PART + 4), (UPDATE, 2 * PART + 4), (WHOLE, 2 * STACK + 4)],
    ids=["cut", "updated", "read whole"],
)
def test_a_fusion_in_a_fusion(body: list[tuple[Any, ...]], moved: int, depth: int) -> None:
    parts = [body]
    for k in range(depth):
        parts.append(around(body, k))
    assert moved_bytes(module(*parts)) == moved


@pytest.mark.parametrize(
    ("body", "moved"), [(CUT, 2 * PART + 4), (UPDATE, 2 * PART + 4)], ids=["cut", "updated"]
)
def test_an_asynchronous_fusion_counts_as_the_fusion(
    body: list[tuple[Any, ...]], moved: int
) -> None:
    fused = around(body, 0)
    start = [*around(fused, 1)[:-1], ("async-start", STACK, (0, 1), (1,))]
    done = ("async-done", body[-1][1], (len(start) - 1,), ())
    assert moved_bytes(module(body, fused, [*start, done])) == moved


def test_scan_writes_each_slice_of_a_stacked_output_once() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jnp.sin(x), jnp.cos(x)), x, None, length=64)[1]

    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    report = xform.memory_analysis(f, x)
    stack = 64 * 1024 * 4
    # Initial zeros, sine and cosine read and written, slices read and placed; and counters.
    assert 3 * stack <= report.moved_bytes <= 7.1 * stack


def test_a_loop_that_recomputes_its_states_moves_more_bytes_than_one_that_saves_all() -> None:
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)

    def loss(x: jax.Array) -> jax.Array:
        step = lambda h, _: (jnp.sin(h + jnp.roll(h, 1)), None)
        return jnp.sum(jax.lax.scan(step, x, None, length=40)[0])

    few_states = xform.policies.budget(12 * 64 * 32 * 4, of="saved")
    moved = lambda policy: xform.memory_analysis(xform.grad(loss, policy=policy), x).moved_bytes
    assert moved(few_states) > moved("save_everything")


@pytest.mark.parametrize("policy", ["save_nothing", "save_everything"])
def test_collectives_for_recomputed_operations_are_counted_apart(policy: str) -> None:
    """The compiler inserts them, because the sum over the sharded axis of `w` is recomputed."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    at = lambda *spec: jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=at(None, "x"))
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=at("x"))
    whole = lambda y: jax.lax.with_sharding_constraint(y, at())
    layer = lambda w, x: jnp.sin(jnp.sin(whole(x @ w)))
    loss = lambda w, x: jnp.sum(jax.checkpoint(layer)(w, x) ** 3)
    if policy == "save_everything":
        loss = lambda w, x: jnp.sum(layer(w, x) ** 3)
    report = xform.memory_analysis(xform.value_and_grad(loss, policy=policy), w, x)
    (reduced,) = [c for c in report.collectives if c.kind == "all-reduce"]
    again = policy == "save_nothing"
    assert (reduced.count, reduced.repeated) == ((2, 1) if again else (1, 0))
    assert reduced.repeated_bytes == again * 16 * 64 * 4
    assert ("for recomputed operations" in str(report)) == again
    assert report.to_dict()["collectives"][0]["repeated"] == again
