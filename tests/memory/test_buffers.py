"""The replayed heap against the compiler's own numbers."""

from pathlib import Path
from typing import Any

import pytest

from tests.memory.dumps import PROGRAMS, dumped
from xform.errors import WrongArgument
from xform.memory.buffers import Assignment, read


def varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def message(**fields: Any) -> bytes:
    """Return a message of numbers, bytes, and lists of them, for fields named f1, f2, ..."""
    out = b""
    for name, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            wire = 0 if isinstance(value, int) else 2
            out += varint(int(name[1:]) << 3 | wire)
            out += varint(value) if wire == 0 else varint(len(value)) + value
    return out


def made(events: list[tuple[int, ...]], sizes: dict[int, int], block: int, space: int = 0) -> bytes:
    """Return a module of one computation in which instruction n makes buffer n, with a heap."""
    f32 = message(f2=11)
    instructions = [message(f1=b"i%d" % n, f2=b"add", f3=f32, f35=n) for n in sizes]
    module = message(f1=b"m", f6=9, f3=message(f1=b"main", f2=instructions, f5=9, f6=max(sizes)))
    buffers = [message(f1=n, f2=size, f3=message(f4=n)) for n, size in sizes.items()]
    mine = [message(f1=n, f2=0, f3=size) for n, size in sizes.items()]
    heap = [message(f1=kind, f2=n, f5=rest[0] if rest else 0) for kind, n, *rest in events]
    assignment = message(f1=buffers, f3=message(f1=0, f2=block, f8=space, f9=mine),
                         f4=message(f1=heap, f2=1))  # fmt: skip
    return message(f1=module, f3=assignment)


ALLOC, FREE, SHARE = 0, 1, 2


def test_replay() -> None:
    events = [(ALLOC, 1), (ALLOC, 2), (FREE, 1), (ALLOC, 3), (FREE, 2), (FREE, 3)]
    a = read(made(events, {1: 100, 2: 40, 3: 80}, 192))
    assert a.live == [100, 140, 120]
    assert (a.peak_step, a.temp_bytes, a.fragmentation_bytes) == (1, 192, 52)
    assert {(s.bytes, s.born, s.dies) for s in a.chunks} == {(100, 0, 1), (40, 1, 2), (80, 2, 2)}


def test_shared_storage_is_freed_after_all_its_sharers() -> None:
    events = [(ALLOC, 1), (SHARE, 2, 1), (FREE, 1), (ALLOC, 3), (FREE, 3), (FREE, 2), (ALLOC, 4)]
    a = read(made(events, {1: 100, 2: 100, 3: 10, 4: 100}, 110))
    assert a.live == [100, 100, 110, 100]
    assert a.fragmentation_bytes == 0
    assert [len(s.buffers) for s in a.chunks] == [1, 2, 1]


def test_buffers_without_a_free_event_live_to_the_end() -> None:
    a = read(made([(ALLOC, 1), (ALLOC, 2)], {1: 8, 2: 8}, 16))
    assert a.live == [8, 16]


def test_one_of_two_results_takes_a_place_that_was_freed_meanwhile() -> None:
    events = [(ALLOC, 1), (ALLOC, 2), (FREE, 1), (SHARE, 3, 1), (FREE, 2), (FREE, 3)]
    data = made(events, {1: 100, 2: 40, 3: 100}, 140)
    a = read(data.replace(message(f1=3, f2=100, f3=message(f4=3)),
                          message(f1=3, f2=100, f3=message(f4=2))))  # fmt: skip
    assert a.live == [100, 140, 0]
    assert {(s.bytes, s.born, s.dies) for s in a.chunks} == {(100, 0, 1), (40, 1, 1)}


def test_a_block_without_the_events_of_its_heap() -> None:
    a = read(made([], {1: 8, 2: 8}, 32))
    assert [(s.bytes, s.born, s.dies) for s in a.chunks] == [(8, 0, 0), (8, 1, 1)]
    assert (a.live, a.fragmentation_bytes) == ([8, 8], 24)


def test_other_memories_do_not_count() -> None:
    a = read(made([(ALLOC, 1), (FREE, 1)], {1: 100}, 100, space=1))
    assert (a.temp_bytes, a.total_bytes, a.live) == (0, 0, [0])
    assert a.chunks[0].allocation.space == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_are_the_compilers(name: str) -> None:
    data, stats = dumped(name)
    a = read(data)
    assert a.argument_bytes == stats.argument_size_in_bytes
    assert a.output_bytes == stats.output_size_in_bytes
    assert a.temp_bytes == stats.temp_size_in_bytes
    assert a.alias_bytes == stats.alias_size_in_bytes
    assert a.fragmentation_bytes <= max(0.02 * a.temp_bytes, 1024)


@pytest.mark.parametrize("name", PROGRAMS)
def test_live_bytes_are_those_of_the_storages(name: str) -> None:
    a: Assignment = read(dumped(name)[0])
    counted = [s for s in a.chunks if s.allocation.kind in ("argument", "output", "temp")]
    for step in {0, a.peak_step, len(a.live) - 1}:
        assert a.live[step] == sum(s.bytes for s in counted if s.born <= step <= s.dies)
    assert len(a.live) == len(a.module.order)
    assert a.live[a.peak_step] == a.total_bytes - a.fragmentation_bytes


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "m.hlo.pb"
    path.write_bytes(dumped("scan")[0])
    assert (
        read(path).total_bytes == read(str(path)).total_bytes == read(dumped("scan")[0]).total_bytes
    )


def refused(source: Any) -> str:
    with pytest.raises(WrongArgument) as caught:
        read(source)
    return str(caught.value)


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "m.hlo.pb"
    path.write_bytes(dumped("scan")[0][:-100])
    asked, problem, remedy = refused(path).splitlines()
    assert asked == f"memory of a compiled program, read from {path}"
    assert "a field ends at byte" in problem
    assert remedy == (
        "  remedy:  dump it again with compiler_options={'xla_dump_to': folder, "
        "'xla_dump_hlo_as_proto': True}, and read *after_optimizations.hlo.pb"
    )


def test_not_a_dump() -> None:
    assert "holds no HLO module" in refused(b"")
    assert "problem:" in refused(b"\x00\xff" * 40)
    assert "problem:" in refused(b"HloModule m, is_scheduled=true")


def test_a_dump_without_a_buffer_assignment() -> None:
    module = message(f1=b"m", f6=9, f3=message(f1=b"main", f5=9))
    assert "no buffer assignment" in refused(message(f1=module))


def test_events_of_a_missing_buffer_are_refused() -> None:
    data = made([(ALLOC, 1), (ALLOC, 7)], {1: 8}, 8)
    assert "refer to an entry that is missing" in refused(data)
