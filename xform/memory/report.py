"""What a compiled function needs of each device, what is live at its peak, and whose it is."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from xform.errors import WrongArgument
from xform.memory import buffers
from xform.memory.attribute import Argument, Row, rows
from xform.memory.buffers import Assignment
from xform.memory.compilation import Compilation
from xform.memory.page import write
from xform.memory.plot import draw
from xform.memory.roles import role
from xform.memory.traffic import Collective, collectives, moved_bytes
from xform.text import columns, human_bytes, human_flops, human_seconds

# Lines of a table that is printed.
_LINES = 12
_BYTES = ("argument", "output", "temp", "alias", "total", "host", "code")
_NOTES = {
    "alias": "outputs in the memory of donated arguments",
    "total": "argument + output + temp - alias",
    "host": "offloaded, in the host's memory",
}
_GROUPS = ("category", "where", "scope", "operation")
_HALF = ("bf16", "f16", "f8")


@dataclasses.dataclass(frozen=True)
class Group:
    """Buffers that are live at the peak and have something in common.

    Attributes:
      name: the line, scope, category or operation; empty where there is none.
      bytes: of all of them, on one device.
      count: how many they are.
    """

    name: str
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryReport:
    """Memory of one compiled function on each device; prints as tables, draws, writes a page.

    Iterates over the buffers that are live at the peak, largest first.

    Attributes:
      compilation: what the compiler said, with the target.
      shapes: dtype and shape of the arguments, over all devices.
    """

    compilation: Compilation
    shapes: frozenset[tuple[str, tuple[int, ...]]] = frozenset()

    @property
    def function(self) -> str:
        """What was compiled."""
        return self.compilation.function

    @property
    def target(self) -> str:
        """What it was compiled for."""
        return self.compilation.target.name

    @property
    def argument_bytes(self) -> int:
        """Inputs."""
        return self.compilation.argument_bytes

    @property
    def output_bytes(self) -> int:
        """Outputs."""
        return self.compilation.output_bytes

    @property
    def temp_bytes(self) -> int:
        """Everything in between, at its peak."""
        return self.compilation.temp_bytes

    @property
    def alias_bytes(self) -> int:
        """Outputs that reuse the memory of donated inputs, counted in both of the above."""
        return self.compilation.alias_bytes

    @property
    def host_bytes(self) -> int:
        """What waits in host memory (offloaded values)."""
        return self.compilation.host_bytes

    @property
    def code_bytes(self) -> int:
        """The compiled code."""
        return self.compilation.code_bytes

    @property
    def total_bytes(self) -> int:
        """The headline: argument + output + temp - alias; of a refused program, what it needs."""
        return self.compilation.total_bytes

    @property
    def flops(self) -> int:
        """Of the whole program over all devices, with trip counts; see `xform.planner.cost`."""
        return self.compilation.flops

    @property
    def compile_seconds(self) -> float:
        """Wall time of the compiler."""
        return self.compilation.compile_seconds

    @property
    def capacity_bytes(self) -> int | None:
        """Memory of a device, if it is known."""
        return self.compilation.target.device.capacity_bytes

    @property
    def head_room_bytes(self) -> int | None:
        """What is left of the capacity; negative if the program is over it."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        """Whether a device has room for it; True where the capacity is not known."""
        return self.compilation.fits

    @cached_property
    def assignment(self) -> Assignment | None:
        """Where the compiler put everything; None if it did not say."""
        module = self.compilation.module
        return None if module is None else buffers.read(module)

    @cached_property
    def buffers(self) -> tuple[Row, ...]:
        """Every buffer, largest first; none if the compiler did not say."""
        if self.assignment is None:
            return ()
        module = self.assignment.module
        names = self.compilation.arguments
        given = {
            i.number: names[i.number] if i.number < len(names) else i.op_name
            for i in module.computations[module.entry].instructions
            if i.opcode == "parameter"
        }
        return tuple(rows(self.assignment, {n: Argument(x, role(x)) for n, x in given.items()}))

    @property
    def peak(self) -> tuple[Row, ...]:
        """The buffers that are live at the peak; they add up to `total_bytes`."""
        return tuple(row for row in self.buffers if row.at_peak)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.peak)

    @property
    def live(self) -> Sequence[int]:
        """Bytes that are live at each step of the program, arguments and outputs included."""
        return self.assignment.live if self.assignment else ()

    @property
    def peak_step(self) -> int:
        """The step at which most is live."""
        return self.assignment.peak_step if self.assignment else 0

    @cached_property
    def moved_bytes(self) -> int:
        """Bytes that each device reads and writes in a run, if nothing stays in a cache."""
        return moved_bytes(self.assignment.module) if self.assignment else 0

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """What devices send each other."""
        return collectives(self.assignment.module) if self.assignment else ()

    @property
    def intensity(self) -> float | None:
        """FLOPs of a device for each byte that it moves."""
        each = self.flops / self.compilation.devices
        return each / self.moved_bytes if self.moved_bytes else None

    @property
    def seconds(self) -> float | None:
        """An estimate of a run's time by the roofline: the larger of computing and moving.

        It leaves out communication and all that keeps a device from its peak: a lower bound as
        far as `moved_bytes` is right. None where the device's speed is not known.
        """
        device = self.compilation.target.device
        half = sum(r.bytes for r in self.peak if r.dtype.startswith(_HALF))
        whole = sum(r.bytes for r in self.peak if r.dtype.startswith("f32"))
        speed = device.flops_per_second if half >= whole else device.f32_flops_per_second
        if not speed or not device.bytes_per_second or self.assignment is None:
            return None
        each = self.flops / self.compilation.devices
        return max(each / speed, self.moved_bytes / device.bytes_per_second)

    def by(self, key: str) -> list[Group]:
        """What is live at the peak, grouped, largest first.

        Args:
          key: `"category"`, `"where"` (source line), `"scope"` (named scope, module path) or
            `"operation"`.
        """
        if key not in _GROUPS:
            raise WrongArgument(f"by({key!r})", "buffers have no such property", "",
                                f"give one of {', '.join(_GROUPS)}")  # fmt: skip
        found: dict[str, list[int]] = {}
        for row in self.peak:
            found.setdefault(getattr(row, key), []).append(row.bytes)
        groups = [Group(name, sum(sizes), len(sizes)) for name, sizes in found.items()]
        return sorted(groups, key=lambda g: (-g.bytes, g.name))

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        device = self.compilation.target.device
        return {
            "function": self.function,
            "target": self.target,
            "device": {
                "name": device.name,
                "capacity_bytes": device.capacity_bytes,
                "flops_per_second": device.flops_per_second,
                "bytes_per_second": device.bytes_per_second,
                "count": self.compilation.devices,
            },
            **{f"{k}_bytes": getattr(self, f"{k}_bytes") for k in _BYTES},
            "fits": self.fits,
            "flops": self.flops,
            "moved_bytes": self.moved_bytes,
            "seconds_estimate": self.seconds,
            "compile_seconds": self.compile_seconds,
            "collectives": [dataclasses.asdict(c) for c in self.collectives],
            "live": list(self.live),
            "peak_step": self.peak_step,
            "buffers": [row.to_dict() for row in self.buffers],
        }

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(self.to_dict())

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw live bytes over the program, and what is live at the peak; PNG, SVG or PDF."""
        draw(self.to_dict(), path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that needs nothing else: hover, zoom, search. It appears whole."""
        write([self.to_dict()], path)

    def diff(self, other: MemoryReport) -> Difference:
        """What another report has more, or less: of another policy, version or target."""
        return Difference(self, other)

    def __str__(self) -> str:
        return "\n\n".join(part for part in (self._head(), self._numbers(), *self._tables()) if part)

    def _head(self) -> str:
        compiled = self.compilation
        many = f"{compiled.devices} x " if compiled.devices > 1 else ""
        return f"{self.function} on {self.target} ({many}{compiled.target.device.name})"

    def _numbers(self) -> str:
        lines = [
            [k, human_bytes(getattr(self, f"{k}_bytes")), _NOTES.get(k, "")]
            for k in _BYTES
            if k != "host" or self.host_bytes
        ]
        room = self.head_room_bytes
        if room is not None:
            of = f"of {human_bytes(self.capacity_bytes or 0)}"
            lines.append(["head-room", human_bytes(room), of] if room >= 0 else
                         ["over by", human_bytes(-room), of])  # fmt: skip
        lines.append(["flops", human_flops(self.flops), ""])
        if self.moved_bytes and self.intensity is not None:
            lines.append(["moved", human_bytes(self.moved_bytes),
                          f"{self.intensity:.0f} FLOP for each byte"])  # fmt: skip
        if self.seconds is not None:
            lines.append(["step", human_seconds(self.seconds), "estimate, by the roofline"])
        for c in self.collectives:
            lines.append([c.kind, human_bytes(c.bytes), f"{c.count} times"])
        lines.append(["compile", f"{self.compile_seconds:.2f} s", ""])
        return columns(lines, right=(1,))

    def _tables(self) -> Iterator[str]:
        if not self.peak:
            return
        yield "live at the peak, by category\n" + _grouped(self.by("category"), self.total_bytes)
        table = [["bytes", "type", "category", "operation", "line", "scope"]]
        for row in self.peak[:_LINES]:
            shape = f"{row.dtype}[{','.join(map(str, row.shape))}]" if row.dtype else ""
            table.append([human_bytes(row.bytes), shape, row.category,
                          row.operation if row.operation != "parameter" else row.name,
                          row.where, row.scope])  # fmt: skip
        rest = self.peak[_LINES:]
        if rest:
            table.append([human_bytes(sum(r.bytes for r in rest)), f"{len(rest)} more", *[""] * 4])
        yield "the largest of them\n" + columns(table, right=(0,))


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two reports, side by side; prints as tables."""

    one: MemoryReport
    other: MemoryReport

    def rows(self, key: str = "where") -> list[tuple[str, int, int]]:
        """Bytes at the peak of each line (or `key`, see `MemoryReport.by`), largest change first."""
        left, right = ({g.name: g.bytes for g in r.by(key)} for r in (self.one, self.other))
        found = [(k, left.get(k, 0), right.get(k, 0)) for k in {*left, *right}]
        return sorted(found, key=lambda r: (-abs(r[1] - r[2]), r[0]))

    def __str__(self) -> str:
        names = [f"{r.function} on {r.target}" for r in (self.one, self.other)]
        numbers = [["", *names, "change"]] + [
            self._line(k, *(getattr(r, f"{k}_bytes") for r in (self.one, self.other)))
            for k in _BYTES
        ]
        parts = [columns(numbers, right=(1, 2, 3))]
        for key in ("category", "where"):
            changed = [r for r in self.rows(key) if r[1] != r[2]][:_LINES]
            if changed:
                lines = [[key, *names, "change"], *(self._line(*r) for r in changed)]
                parts.append(columns(lines, right=(1, 2, 3)))
        return "\n\n".join(parts)

    def _line(self, name: str, a: int, b: int) -> list[str]:
        sign = "-" if b < a else "+"
        return [name or "(none)", human_bytes(a), human_bytes(b), sign + human_bytes(abs(b - a))]


def _grouped(groups: Sequence[Group], total: int) -> str:
    return columns(
        [
            [g.name or "(none)", human_bytes(g.bytes), f"{g.bytes / max(total, 1):.0%}",
             f"{g.count} buffers" if g.count > 1 else "1 buffer"]
            for g in groups
        ],
        right=(1, 2),
    )  # fmt: skip
