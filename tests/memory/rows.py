"""What holds for the rows of every memory report of a CPU."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from xform.memory.attribute import FRAGMENTATION
from xform.memory.hlo import Shape
from xform.memory.report import MemoryReport

_PASSING = ("temporary", "activation", "recompute", "gradient")


def wrong_rows(report: MemoryReport) -> list[str]:
    """Describe the rows that cannot be right, such as one that is larger than its type.

    A value that no argument and no output holds is not there from the first step to the last.
    """
    last = len(report.live) - 1
    wrong = [
        f"{row.name}: {row.bytes} bytes of {row.dtype}{row.shape}"
        for row in report.buffers
        if row.dtype not in ("", "tuple") and row.bytes > Shape(row.dtype, row.shape).bytes
    ]
    wrong += [
        f"{row.name}: {row.category} at all steps"
        for row in report.buffers
        if row.category in _PASSING
        and not row.output
        and row.name != FRAGMENTATION
        and (row.born, row.dies) == (0, last)
    ]
    if sum(row.bytes for row in report.peak) != report.total_bytes:
        wrong.append("the rows at the peak do not add up")
    return wrong


def reports_in(result: Any) -> Iterator[MemoryReport]:
    """Yield the memory reports in a result."""
    if isinstance(result, MemoryReport):
        yield result
    elif dataclasses.is_dataclass(result):
        for field in dataclasses.fields(result):
            yield from reports_in(getattr(result, field.name))
    elif isinstance(result, Mapping):
        yield from reports_in(tuple(result.values()))
    elif isinstance(result, tuple | list):
        for part in result:
            yield from reports_in(part)
