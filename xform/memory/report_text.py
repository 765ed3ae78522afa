"""Print a memory report as text: tables of bytes, of work, and of the buffers at the peak."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from xform.memory.added import Added
from xform.memory.attribute import BufferRow
from xform.memory.buffers import ON_CHIP
from xform.memory.difference import KINDS, LINES
from xform.memory.recomputed import Recomputed, summary
from xform.terminal.text import columns, human_bytes, human_flops, human_seconds

# Kinds of bytes that are printed only if they are not 0.
_RARE = ("constant", "host", "vmem")
_NOTES = {
    "alias": "outputs in the memory of donated arguments",
    "total": "argument + output + temp - alias",
    "constant": "in the program, such as arrays that the function closes over",
    "host": "offloaded to host memory",
    "vmem": "in the fast memory on the chip, not in the total",
}


def report_text(report: Any) -> str:
    """Return the text of a `MemoryReport`."""
    return "\n\n".join(_parts(report))


def _parts(report: Any) -> Iterator[str]:
    """Yield the parts of the text: a head, the tables, and the advice."""
    count = f"{report.devices} x " if report.devices > 1 else ""
    head = f"{report.function} on {report.target} ({count}{report.device.name})"
    yield "\n".join(filter(None, (head, str(report.description), report.uncounted)))
    yield columns([*_byte_lines(report), *_work_lines(report)], right=(1,))
    if report.refused:
        yield "the compiler refused it and reports nothing else: use xform.memory.why_oom"
    elif report.assignment is None:
        yield ("the compiler wrote no buffer assignment, so the buffers at the peak are not known: "
               "check the flags xla_dump_* in XLA_FLAGS")  # fmt: skip
    if report.peak:
        yield "live at the peak, by category\n" + _category_table(report)
        yield "the largest buffers\n" + _buffer_table(report.peak)
    if report.added:
        yield "added by the compiler\n" + _added_table(report.added)
    if report.recomputed:
        head = f"recomputed by the compiler, because memory is short: {summary(report.recomputed)}"
        yield f"{head}\n{_recomputed_table(report.recomputed)}"
    if report.on_chip:
        memory = ON_CHIP[report.on_chip[0].space]
        head = (f"live in the fast memory on the chip ({memory}), at the step with the most "
                "bytes there; a larger program has less there and more in temp")  # fmt: skip
        yield f"{head}\n{_buffer_table(report.on_chip)}"
    if report.advice:
        yield "to use less memory\n" + "\n".join(f"- {text}" for text in report.advice)


def _byte_lines(report: Any) -> Iterator[list[str]]:
    """Yield the lines about bytes: name, bytes, note."""
    if report.refused:
        yield ["total", human_bytes(report.total_bytes), "as far as the compiler says"]
    else:
        for kind in KINDS:
            if (size := getattr(report, f"{kind}_bytes")) or kind not in _RARE:
                yield [kind, human_bytes(size), _NOTES.get(kind, "")]
    head_room, capacity, limit = report.head_room_bytes, report.capacity_bytes, report.limit_bytes
    if head_room is not None:
        name = "head-room" if head_room >= 0 else "over by"
        of = f"of {human_bytes(limit)}"
        if limit < capacity:
            of += f", above which XLA recomputes operations ({human_bytes(capacity)} of memory)"
        yield [name, human_bytes(abs(head_room)), of]
    elif capacity is not None:
        yield ["over by", human_bytes(None), f"of {human_bytes(capacity)}"]


def _work_lines(report: Any) -> Iterator[list[str]]:
    """Yield the lines about work, time and communication: name, amount, note."""
    yield ["flops", human_flops(report.flops), ""]
    if report.intensity is not None:
        intensity = f"{report.intensity:.0f} FLOP for each byte"
        yield ["moved", human_bytes(report.moved_bytes), intensity]
    if report.seconds is not None:
        yield ["step", human_seconds(report.seconds), "an estimate, by the roofline"]
    for c in report.collectives:
        repeated = f", {c.repeated} for recomputed operations" if c.repeated else ""
        yield [c.kind, human_bytes(c.bytes), f"{c.count} times{repeated}"]
    if report.compile_seconds:
        yield ["compile", f"{report.compile_seconds:.2f} s", ""]


def _category_table(report: Any) -> str:
    """Return a table of the bytes, share and number of buffers of each category at the peak."""
    groups = report.group_by("category")
    total = sum(g.bytes for g in groups)
    lines = [
        [g.name, human_bytes(g.bytes), f"{g.bytes / max(total, 1):.0%}", f"in {g.count}"]
        for g in groups
    ]
    return columns(lines, right=(1, 2))


def _added_table(rows: Sequence[Added]) -> str:
    """Return a table of the bytes that the compiler added."""
    table = [["at the peak", "moved", "runs", "kind", "most at"]]
    for row in rows:
        sizes = human_bytes(row.peak_bytes), human_bytes(row.moved_bytes)
        table.append([*sizes, str(row.count or ""), row.kind, row.where])
    return columns(table, right=(0, 1, 2))


def _recomputed_table(rows: Sequence[Recomputed]) -> str:
    """Return a table of the operations that the compiler recomputes by itself."""
    table = [["flops", "bytes", "runs", "operation", "line"]]
    for row in rows[:LINES]:
        amounts = human_flops(row.flops), human_bytes(row.bytes), str(row.count)
        table.append([*amounts, row.operation, row.where])
    if rest := rows[LINES:]:
        table.append(["", "", "", f"{len(rest)} more", ""])
    return columns(table, right=(0, 1, 2))


def _buffer_table(rows: Sequence[BufferRow]) -> str:
    """Return a table of the largest buffers, with the total of smaller ones in the last line."""
    table = [["bytes", "type", "category", "operation", "line", "scope"]]
    for row in rows[:LINES]:
        about = row.type, row.category, row.maker, row.where, row.scope
        table.append([human_bytes(row.bytes), *about])
    if rest := rows[LINES:]:
        size = human_bytes(sum(r.bytes for r in rest))
        table.append([size, f"{len(rest)} more", *[""] * 4])
    return columns(table, right=(0,))
