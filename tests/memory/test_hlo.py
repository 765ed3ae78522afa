"""Reading a module: types, places, and the order of execution."""

import jax.numpy as jnp
import pytest

from tests.memory.dumps import dumped
from xform.memory.hlo import Module, Shape
from xform.memory.proto import Message


def module(name: str) -> Module:
    return Module(Message(dumped(name)[0]).message(1))


def test_entry_parameters_have_the_arguments_names() -> None:
    m = module("recompute")
    entry = m.computations[m.entry].instructions
    names = {i.number: i.op_name for i in entry if i.opcode == "parameter"}
    assert names == {0: "p['w']", 1: "x"}


def test_types() -> None:
    m = module("scan")
    root = m.root(m.entry)
    assert root.shape.dtype == "tuple"
    assert root.shape.at((1,)) == Shape("f32", (4, 64, 64), (2, 1, 0))
    assert root.shape.at((1,)).bytes == 4 * 64 * 64 * 4


@pytest.mark.parametrize(("name", "trips"), [("scan", {4}), ("while", {1}), ("down", {1})])
def test_how_often_a_loop_runs_where_that_can_be_read(name: str, trips: set[int]) -> None:
    m = module(name)
    loops = [i for i in m.instructions.values() if i.opcode == "while"]
    assert {m.trips(loop) for loop in loops} == trips


@pytest.mark.parametrize(
    ("dtype", "dims", "size"),
    [
        ("bf16", (3, 5), 30),
        ("bool", (7,), 7),
        ("i4", (3,), 2),
        ("c64", (2,), 16),
        ("f8_e4m3fn", (9,), 9),
        ("f4_e2m1fn", (3,), 2),
        ("f32", (0, 4), 0),
        ("f64", (), 8),
        ("tuple", (), 0),
        ("token", (), 0),
    ],
)
def test_bytes(dtype: str, dims: tuple[int, ...], size: int) -> None:
    assert Shape(dtype, dims).bytes == size


def test_places_are_the_users() -> None:
    m = module("scan")
    places = {m.where(i) for i in m.instructions.values()} - {""}
    assert {p.rpartition("/")[2].split(":")[0] for p in places} == {"dumps.py"}
    assert any(p.endswith("(layer)") for p in places)


def test_a_place_without_a_stack() -> None:
    metadata = b"\x1a\x08/me/a.py\x20\x07"
    instruction = b"\x0a\x01a\x12\x03add\x98\x02\x05" + b"\x3a" + bytes([len(metadata)]) + metadata
    computation = b"\x28\x01\x30\x05\x12" + bytes([len(instruction)]) + instruction
    m = Module(Message(b"\x0a\x01m\x30\x01\x1a" + bytes([len(computation)]) + computation))
    assert m.where(m.root(1)) == "/me/a.py:7"
    assert (m.name, m.root(1).name, m.root(1).opcode) == ("m", "a", "add")


def test_program_order() -> None:
    m = module("while")
    order = m.order
    (loop,) = (i for i in m.instructions.values() if i.opcode == "while")
    body, condition = (m.root(c) for c in loop.called)
    assert order[condition.id] < order[body.id] < order[loop.id]
    fused = {i.id for c in m.computations.values() if c.fused for i in c.instructions}
    assert not fused & order.keys()
    assert sorted(order.values()) == list(range(len(order)))


def test_donation() -> None:
    assert module("donated").aliases == [((0,), 0, ())]
    assert module("scan").aliases == []


def test_a_dtype_that_is_not_known() -> None:
    assert Shape("opaque").bytes == 0
    assert jnp.bfloat16.dtype.itemsize == Shape("bf16", (1,)).bytes
