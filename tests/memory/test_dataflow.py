"""Where values come from, and who reads them."""

from tests.memory.dumps import dumped
from xform.memory.buffers import read
from xform.memory.dataflow import DataFlow
from xform.memory.hlo import Module


def entry(m: Module, number: int) -> int:
    found = m.computations[m.entry].instructions
    return next(i.id for i in found if i.opcode == "parameter" and i.number == number)


def test_a_stacked_value_comes_from_the_operation_in_the_loop() -> None:
    a = read(dumped("scan")[0])
    flow = DataFlow(a.module)
    stacks = [
        flow.origin(b.instruction, b.index)
        for s in a.chunks
        if s.allocation.kind == "temp" and s.bytes == 4 * 32 * 64 * 4
        for b, _ in s.buffers
    ]
    names = {i.op_name.rpartition("/")[2] for i in stacks}
    assert "tanh" in names
    assert all(flow.where(i) for i in stacks)


def test_readers_of_an_argument_are_found_inside_loops() -> None:
    m = read(dumped("scan")[0]).module
    readers = DataFlow(m).readers([(entry(m, 0), ())])
    assert len({r.computation for r in readers}) == 2
    assert m.entry not in {r.computation for r in readers}


def test_the_state_of_a_while_loop() -> None:
    m = read(dumped("while")[0]).module
    flow = DataFlow(m)
    made = flow.origin(m.root(m.entry).id)
    assert made.opcode not in ("while", "get-tuple-element", "parameter", "tuple", "copy")
    assert "(<lambda>)" in flow.where(made)
    (loop,) = (i for i in m.instructions.values() if i.opcode == "while")
    readers = {r.computation for r in flow.readers([(entry(m, 0), ())])}
    assert readers == set(loop.called)


def test_an_argument_is_its_own_origin() -> None:
    m = read(dumped("odd")[0]).module
    x = entry(m, 0)
    assert DataFlow(m).origin(x) is m.instructions[x]
    assert DataFlow(m).only_initializes(m.instructions[x])
