"""Copies, padding and scratch of compiled programs: of XLA:CPU, and of instructions by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xform
from xform.memory.added import Added, added
from xform.memory.attribute import FRAGMENTATION
from xform.memory.hlo import Shape

N = 64
KIB = 2**10


def one(instruction: dict[str, Any], **row: Any) -> tuple[Added, ...]:
    """Return what is found in a program of one instruction and one buffer at the peak."""
    known = {"id": 1, "name": "it.1", "opcode": "add", "op_name": "jit(f)/add", "target": "",
             "operands": (), "called": ()}  # fmt: skip
    i = SimpleNamespace(**known | instruction)
    computation = SimpleNamespace(instructions=(i,), root=1)
    module: Any = SimpleNamespace(
        entry=0, computations={0: computation}, instructions={1: i}, where=lambda _: "f.py:3 (f)"
    )
    buffer: Any = {"name": "it.1", "bytes": KIB, "where": "", "space": 0, "at_peak": True}
    rows: Any = [SimpleNamespace(**buffer | row)]
    return added(module, rows)


def f32(*dims: int, space: int = 0) -> Shape:
    return Shape("f32", dims, space=space)


@pytest.mark.parametrize(("name", "found"), {
    "an addition": (one({"shape": f32(256)}), None),
    "a copy": (one({"shape": f32(256), "opcode": "copy", "op_name": ""}), ("copies", KIB, KIB)),
    "jnp.copy": (one({"shape": f32(256), "opcode": "copy", "op_name": "jit(f)/copy"}), None),
    "to the host": (
        one({"shape": f32(256, space=5), "opcode": "copy", "op_name": ""}, space=5, at_peak=False),
        ("host copies", KIB, KIB),
    ),
    "padded": (one({"shape": f32(200)}), ("padding", KIB - 800, 0)),
    "a transfer": (
        one({"shape": Shape("tuple", elements=(f32(64), f32(192))), "opcode": "all-gather-start"},
            name="it.1{1}"),
        ("asynchronous values", KIB, 0),
    ),
    "work space": (
        one({"shape": Shape("tuple", elements=(f32(256), Shape("u8", (KIB,)))),
             "opcode": "custom-call"}, name="it.1{1}"),
        ("scratch", KIB, 0),
    ),
    "the result of a kernel": (
        one({"shape": Shape("tuple", elements=(f32(256), Shape("u8", (KIB,)))),
             "opcode": "custom-call"}, name="it.1{0}"), None,
    ),
    "gaps": (one({"shape": f32(256)}, name=FRAGMENTATION), ("gaps", KIB, 0)),
}.items())  # fmt: skip
def test_kinds(name: str, found: Any) -> None:
    rows, want = found
    if want is None:
        assert rows == ()
        return
    (row,) = rows
    kind, peak_bytes, moved_bytes = want
    assert (row.kind, row.peak_bytes) == (kind, peak_bytes)
    if moved_bytes:
        assert row.moved_bytes >= moved_bytes
        assert row.count == 1


def test_a_loop_of_xla_copies_its_first_state() -> None:
    """XLA:CPU copies an argument that a loop updates in place, unless it is donated."""

    def f(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 9, lambda i, x: x.at[i].add(jnp.sum(x[i])), x)

    types = (jax.ShapeDtypeStruct((N, N), jnp.float32),)
    report, donated = (
        xform.memory_analysis(f, *types, donate_argnums=donate) for donate in ((), (0,))
    )
    (row,) = (row for row in report.added if row.kind == "copies")
    assert row.moved_bytes >= 2 * 4 * N**2
    assert "added by the compiler" in str(report)
    assert sum(row.moved_bytes for row in donated.added) < 4 * N**2
    assert report.to_dict()["added"][0]["kind"] == report.added[0].kind
