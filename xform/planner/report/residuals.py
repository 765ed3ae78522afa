"""The table of residuals: the values of the forward pass that are held for the backward pass.

`xform.residuals` returns a `ResidualTable`, made from a *Schedule*: the plan of a derivative, which
says which values are saved and which are recomputed.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Schedule
from xform.interpret.node import gather, user_equation
from xform.planner.costs.saved_values import SavedValue, saved_values
from xform.program.dimensions import (
    as_data,
    at_sample,
    sample_of,
    sample_text,
    symbolic_dimensions,
)
from xform.program.source import frame
from xform.terminal.notebook import Result
from xform.terminal.text import columns, human_bytes, shorten_place


@dataclasses.dataclass(frozen=True)
class Residual:
    """One value that is held for the backward pass.

    Attributes:
      kind: "kept" (computed and saved), "carry" (a loop's state, saved at the start of some or all
        iterations), "shared" (saved by one branch of a cond, in memory that the row of another
        branch already counts), or "argument" (an input, which needs no new memory).
      type: shape and dtype in one iteration, as JAX writes them: `float32[4,8]`.
      shape: the shape in one iteration; a symbolic dimension is a text, such as "2*b".
      dtype: the dtype.
      trip_bytes: bytes of one iteration, on each device.
      loops: trip counts of the loops that stack the value, outermost first; empty outside loops.
      operation: the primitive that computes the value; for an argument, its name.
      name: the name that `checkpoint_name` gave the value, or "".
      where: the user's line, `file:line (function)`, that computes the value, also inside loop
        bodies and calls.
      why: why the value is saved.
      memory: "device", or the memory that the value is offloaded to.
    """

    kind: str
    shape: tuple[int | str, ...]
    dtype: str
    trip_bytes: int
    operation: str
    where: str
    why: str
    loops: tuple[int, ...] = ()
    name: str = ""
    memory: str = "device"

    @property
    def type(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def trips(self) -> int:
        """How many iterations store the value: the product of `loops`; 1 outside loops."""
        return math.prod(self.loops)

    @property
    def total_bytes(self) -> int:
        """Bytes of all iterations."""
        return self.trip_bytes * self.trips

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and totals as plain data."""
        return {**dataclasses.asdict(self), "trips": self.trips, "total_bytes": self.total_bytes}


@dataclasses.dataclass(frozen=True, repr=False)
class ResidualTable(Result):
    """The values that are held for a backward pass. It prints as a table.

    Attributes:
      title: the function and its policy.
      rows: one for each value, by falling size, arguments last.
    """

    title: str
    rows: tuple[Residual, ...]

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def total_bytes(self) -> int:
        """Saved bytes on the device, without the arguments."""
        return sum(r.total_bytes for r in self._saved_rows if r.memory == "device")

    @property
    def offloaded_bytes(self) -> int:
        """Saved bytes in other memories. On a CPU these are in the same memory as `total_bytes`."""
        return sum(r.total_bytes for r in self._saved_rows if r.memory != "device")

    @property
    def _saved_rows(self) -> list[Residual]:
        """The rows that need memory of their own: no arguments and no shared values."""
        return [r for r in self.rows if r.kind in ("kept", "carry")]

    @property
    def argument_bytes(self) -> int:
        """Bytes of the arguments that the backward pass reads."""
        return sum(r.total_bytes for r in self.rows if r.kind == "argument")

    def to_dict(self) -> dict[str, Any]:
        """Return the title, totals and rows as plain data."""
        return {
            "title": self.title,
            "total_bytes": self.total_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "argument_bytes": self.argument_bytes,
            "rows": [r.to_dict() for r in self.rows],
        }

    def heading(self) -> str:
        """Return the title and the bytes."""
        return f"{self.title}, {self._kept_text()}"

    def _kept_text(self) -> str:
        """Return the saved and the offloaded bytes as text."""
        total = f"{human_bytes(self.total_bytes)} kept"
        if self.offloaded_bytes:
            total += f", {human_bytes(self.offloaded_bytes)} offloaded"
        return total

    def __str__(self) -> str:
        header = [
            "bytes",
            "values",
            "trips",
            "per trip",
            "type",
            "kind",
            "operation",
            "where",
            "why",
        ]
        # Equal rows, such as those of the layers of an unrolled model, share one line.
        lines = [header, *(_cells(r, n) for r, n in collections.Counter(self.rows).items())]
        read = f"{human_bytes(self.argument_bytes)} of arguments read in place"
        return f"{self.title}\n{columns(lines, right=(0, 1, 2, 3))}\n{self._kept_text()}, {read}"


def _cells(r: Residual, count: int) -> list[str]:
    """Return the cells of one line of the table, for `count` equal rows."""
    return [
        human_bytes(r.total_bytes * count),
        str(count),
        " x ".join(map(str, r.loops)),
        human_bytes(r.trip_bytes) if r.loops else "",
        r.type,
        r.kind if r.memory == "device" else f"{r.kind} in {r.memory}",
        f"{r.operation} '{r.name}'" if r.name else r.operation,
        shorten_place(r.where),
        r.why,
    ]


def residuals_of(schedule: Schedule, inputs: Sequence[str], title: str) -> ResidualTable:
    """Return the table of a whole function's Schedule.

    `inputs` are the names of the function's inputs, `title` the title of the table.
    """
    argument_names = gather(list(zip(schedule.joint.inputs, inputs, strict=True)), schedule.reads)
    why = "the backward pass reads it"
    with at_sample(schedule.sample):
        arguments = [
            _row(SavedValue("argument", v.aval, None, why), name) for v, name in argument_names
        ]
        saved = [_row(value) for value in saved_values(schedule)]
        sample = sample_of(symbolic_dimensions(v.aval for v in schedule.joint.inputs))
    title += f", for {sample_text(sample)}" if sample else ""
    by_size = lambda row: -row.total_bytes
    return ResidualTable(title, (*sorted(saved, key=by_size), *sorted(arguments, key=by_size)))


def _row(value: SavedValue, operation: str = "") -> Residual:
    """Return the row of a saved value, or of an argument with the name `operation`."""
    eqn, name = value.origin or (None, "")
    if eqn is not None:
        equation = user_equation(eqn)
        operation = equation.primitive.name
        if operation == "jit":
            operation = f"jit({equation.params['name']})"
    return Residual(
        kind=value.kind,
        shape=as_data(value.aval.shape),
        dtype=str(value.aval.dtype),
        trip_bytes=aval_bytes(value.aval),
        operation=operation,
        where=frame(eqn) if eqn is not None else "",
        why=value.why,
        loops=value.loops,
        name=name,
        memory=value.memory,
    )
