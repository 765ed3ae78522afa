"""What a compiled function needs of each device, what is live at its peak, and whose it is."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from xform.errors import WrongArgument
from xform.memory import advice, buffers
from xform.memory.asked import Asked
from xform.memory.attribute import Argument, Row, fullest, rows
from xform.memory.buffers import ON_CHIP, Assignment
from xform.memory.compilation import Compilation
from xform.memory.difference import KINDS, LINES, Difference
from xform.memory.independent import Shown, shown
from xform.memory.page import write
from xform.memory.phases import Phase, phases
from xform.memory.plot import draw
from xform.memory.roles import role
from xform.memory.traffic import Collective, collectives, moved_bytes
from xform.text import columns, human_bytes, human_flops, human_seconds

_ASKED = ("compiled", "transform", "policy", "code", "given", "planned", "note")
# Kinds that the text leaves out if they are 0.
_RARE = ("constant", "host", "vmem")
_NOTES = {
    "alias": "outputs in the memory of donated arguments",
    "total": "argument + output + temp - alias",
    "constant": "in the program: such as arrays that the function closes over",
    "host": "offloaded, in the host's memory",
    "vmem": "in the fast memory on the chip, not in the total",
}
# Properties of buffers that a report can be grouped by.
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
      asked: of which transform, policy and arguments it is.
    """

    compilation: Compilation
    shapes: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    asked: Asked = dataclasses.field(default_factory=Asked)

    @property
    def function(self) -> str:
        """What was compiled."""
        return self.compilation.function

    @property
    def target(self) -> str:
        """What it was compiled for."""
        return self.compilation.target.name

    @property
    def argument_bytes(self) -> int | None:
        """Inputs."""
        return self.compilation.argument_bytes

    @property
    def output_bytes(self) -> int | None:
        """Outputs."""
        return self.compilation.output_bytes

    @property
    def temp_bytes(self) -> int | None:
        """Everything in between, at its peak."""
        return self.compilation.temp_bytes

    @property
    def alias_bytes(self) -> int | None:
        """Outputs that reuse the memory of donated inputs, counted in both of the above."""
        return self.compilation.alias_bytes

    @property
    def constant_bytes(self) -> int | None:
        """Arrays that are part of the program, beside the headline: those it closes over."""
        return self.compilation.constant_bytes

    @property
    def host_bytes(self) -> int | None:
        """What waits in host memory (offloaded values)."""
        return self.compilation.host_bytes

    @property
    def vmem_bytes(self) -> int | None:
        """The most that is live at once in a TPU's fast memory (VMEM); not part of the total.

        A larger program keeps some of these buffers in main memory, and they then count as
        temporary. None if the compiler refused the program.
        """
        return None if self.compilation.refused else sum(row.bytes for row in self.on_chip)

    @property
    def code_bytes(self) -> int | None:
        """The compiled code."""
        return self.compilation.code_bytes

    @property
    def total_bytes(self) -> int | None:
        """The headline: argument + output + temp - alias; of a refused program, what it needs.

        None, as all other bytes, where a compiler that refused the program does not say it.
        """
        return self.compilation.total_bytes

    @property
    def flops(self) -> int:
        """Of the whole program over all devices, with trip counts; see `xform.cost`."""
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
        """What is left of the capacity, constants counted; negative if the program is over it.

        None where the capacity or the size of the program is not known.
        """
        capacity, size = self.capacity_bytes, self.compilation.device_bytes
        return None if capacity is None or size is None else capacity - size

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
        labels = {
            i.number: names[i.number] if i.number < len(names) else i.op_name
            for i in module.computations[module.entry].instructions
            if i.opcode == "parameter"
        }
        return tuple(rows(self.assignment, {n: Argument(x, role(x)) for n, x in labels.items()}))

    @property
    def peak(self) -> tuple[Row, ...]:
        """The buffers that are live at the peak; they add up to `total_bytes`."""
        return tuple(row for row in self.buffers if row.at_peak)

    @cached_property
    def on_chip(self) -> tuple[Row, ...]:
        """The buffers in the chip's fast memory (VMEM), at the step where they take the most."""
        return tuple(fullest([row for row in self.buffers if row.space in ON_CHIP]))

    def __iter__(self) -> Iterator[Row]:
        return iter(self.peak)

    @cached_property
    def live(self) -> Sequence[int]:
        """Bytes that are live at each step of the program, arguments and outputs included.

        The gaps of the temp blocks, which are reserved throughout, are counted too: the most of
        these bytes is `total_bytes`.
        """
        if self.assignment is None:
            return ()
        gaps = self.assignment.fragmentation_bytes
        return [size + gaps for size in self.assignment.live]

    @property
    def peak_step(self) -> int:
        """The step at which most is live."""
        return self.assignment.peak_step if self.assignment else 0

    @cached_property
    def phases(self) -> Sequence[Phase]:
        """Where the program goes forward, backward, and updates; none of what is no derivative."""
        return phases(self.assignment.module) if self.assignment else ()

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

    @cached_property
    def shown(self) -> Shown:
        """The batches that the program proves, and the classes of its loss."""
        prog = self.compilation.program
        return Shown() if prog is None else shown(prog)

    @cached_property
    def advice(self) -> list[str]:
        """What to change so that it takes fewer bytes, with numbers, the most promising first."""
        return advice.advice(self)

    def by(self, key: str) -> list[Group]:
        """What is live at the peak, grouped, largest first.

        Args:
          key: `"category"`, `"where"` (source line), `"scope"` (named scope, module path) or
            `"operation"`.
        """
        if key not in _GROUPS:
            raise WrongArgument(f"by({key!r})", "buffers have no such property", "",
                                f"give one of {', '.join(_GROUPS)}")  # fmt: skip
        by_name: dict[str, list[int]] = {}
        for row in self.peak:
            by_name.setdefault(getattr(row, key), []).append(row.bytes)
        groups = [Group(name, sum(sizes), len(sizes)) for name, sizes in by_name.items()]
        return sorted(groups, key=lambda g: (-g.bytes, g.name))

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        device = self.compilation.target.device
        return {
            "function": self.function,
            "target": self.target,
            **{k: getattr(self.asked, k) for k in _ASKED},
            "device": {
                "name": device.name,
                "capacity_bytes": device.capacity_bytes,
                "flops_per_second": device.flops_per_second,
                "bytes_per_second": device.bytes_per_second,
                "count": self.compilation.devices,
            },
            **{f"{k}_bytes": getattr(self, f"{k}_bytes") for k in KINDS},
            "fits": self.fits,
            "refused": self.compilation.refused,
            "flops": self.flops,
            "moved_bytes": self.moved_bytes,
            "seconds_estimate": self.seconds,
            "compile_seconds": self.compile_seconds,
            "collectives": [dataclasses.asdict(c) for c in self.collectives],
            "advice": self.advice,
            "live": list(self.live),
            "peak_step": self.peak_step,
            "phases": [phase._asdict() for phase in self.phases],
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
        if not isinstance(other, MemoryReport):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WrongArgument(f"diff({other!r})", "it is no MemoryReport", "",
                                "give what xform.memory_analysis returned")  # fmt: skip
        return Difference(self, other)

    def __str__(self) -> str:
        return "\n\n".join(self._parts())

    def _parts(self) -> Iterator[str]:
        compilation = self.compilation
        many = f"{compilation.devices} x " if compilation.devices > 1 else ""
        head = f"{self.function} on {self.target} ({many}{compilation.target.device.name})"
        yield f"{head}\n{self.asked}".strip()
        yield columns([*self._bytes(), *self._work()], right=(1,))
        if compilation.refused:
            yield "the compiler refused it, and says nothing more: ask xform.why_oom"
        if self.peak:
            yield "live at the peak, by category\n" + _shares(self.by("category"))
            yield "the largest of them\n" + _largest(self.peak)
        if self.on_chip:
            memory = ON_CHIP[self.on_chip[0].space]
            head = (f"live in the fast memory on the chip ({memory}), at its fullest step; a "
                    "larger program keeps less there, and more in temp")  # fmt: skip
            yield f"{head}\n{_largest(self.on_chip)}"
        if self.advice:
            yield "to take less\n" + "\n".join(f"- {text}" for text in self.advice)

    def _bytes(self) -> Iterator[list[str]]:
        if self.compilation.refused:
            yield ["total", human_bytes(self.total_bytes), "as far as the compiler says"]
        else:
            for k in KINDS:
                if (size := getattr(self, f"{k}_bytes")) or k not in _RARE:
                    yield [k, human_bytes(size), _NOTES.get(k, "")]
        room, capacity = self.head_room_bytes, self.capacity_bytes
        if room is not None:
            name = "head-room" if room >= 0 else "over by"
            yield [name, human_bytes(abs(room)), f"of {human_bytes(capacity)}"]
        elif capacity is not None:
            yield ["over by", human_bytes(None), f"of {human_bytes(capacity)}"]

    def _work(self) -> Iterator[list[str]]:
        yield ["flops", human_flops(self.flops), ""]
        if self.intensity is not None:
            each = f"{self.intensity:.0f} FLOP for each byte"
            yield ["moved", human_bytes(self.moved_bytes), each]
        if self.seconds is not None:
            yield ["step", human_seconds(self.seconds), "an estimate, by the roofline"]
        for c in self.collectives:
            yield [c.kind, human_bytes(c.bytes), f"{c.count} times"]
        yield ["compile", f"{self.compile_seconds:.2f} s", ""]


def _shares(groups: Sequence[Group]) -> str:
    total = sum(g.bytes for g in groups)
    rows = [
        [g.name, human_bytes(g.bytes), f"{g.bytes / max(total, 1):.0%}", f"in {g.count}"]
        for g in groups
    ]
    return columns(rows, right=(1, 2))


def _largest(rows: Sequence[Row]) -> str:
    table = [["bytes", "type", "category", "operation", "line", "scope"]]
    for row in rows[:LINES]:
        shape = f"{row.dtype}[{','.join(map(str, row.shape))}]" if row.dtype else ""
        operation = row.name if row.operation == "parameter" else row.operation
        table.append([human_bytes(row.bytes), shape, row.category, operation, row.where, row.scope])
    if rest := rows[LINES:]:
        size = human_bytes(sum(r.bytes for r in rest))
        table.append([size, f"{len(rest)} more", *[""] * 4])
    return columns(table, right=(0,))
