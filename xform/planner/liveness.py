"""What is live when: a simulation of the compiler's memory, from the program alone.

The one model of the peak. Values that are written to memory (`fused`) are put in the order in which
the backend runs them, and their bytes added up from where they are made to where they are last
read. Buffers of outputs serve others before they are written, as XLA lets them; an elementwise
result takes the place of an operand that ends there; a loop has what one trip needs at its worst,
beside what it carries and stacks.

XLA:CPU runs operations breadth first, as soon as their operands are there. Other backends keep to
the order of the program, so far as memory goes. Source: the buffer assignment of XLA,
https://openxla.org/xla/gpu_architecture; its schedulers, `hlo_memory_scheduler.h`.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Sequence

from xform._jax import jaxprs_of, scan_counts, scan_p
from xform.cost import aval_bytes
from xform.interpret.joint import Plan
from xform.ir import Atom, Program, program
from xform.planner.flat import Cell, Flat, Step, flatten
from xform.planner.flat_plan import flatten_plan
from xform.planner.fused import Fusion, fuses
from xform.table import traits

# Buffers smaller than this are not worth a search for another's place.
_SMALL = 1024
# How many outputs' buffers are looked at for one value.
_TRIES = 64


@dataclasses.dataclass(frozen=True)
class Liveness:
    """Live bytes on each device, over a program's steps.

    Attributes:
      argument_bytes, output_bytes: of the program's inputs and outputs.
      live: temporary bytes while each step runs, what it makes included.
      saved: those of them that were made before the first step that depends on a second input, and
        are read after it.
      steps: what the steps are.
    """

    argument_bytes: int
    output_bytes: int
    live: tuple[int, ...]
    saved: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def temp_bytes(self) -> int:
        """The peak of temporary bytes."""
        return max(self.live, default=0)

    @property
    def total_bytes(self) -> int:
        """Arguments, outputs and the peak of what is between: the headline of a `MemoryReport`."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes


def simulate(prog: Program, backend: str, n_seconds: int = 0) -> Liveness:
    """The Liveness of a program on "cpu", "gpu" or "tpu", on one device.

    The last `n_seconds` inputs are cotangents: what depends on them is the second part. Near linear
    in equations; loop bodies are looked into once.
    """
    cpu = backend == "cpu"
    return _simulated(flatten(prog, cpu), prog.inputs, prog.outputs, cpu, n_seconds)


def liveness(how: Plan, backend: str) -> Liveness:
    """The Liveness of both parts of a Plan in one program; simulated once.

    Nothing is traced but loops and calls with what they keep, once each.
    """
    key = "liveness", backend
    if key not in how.cache:
        cpu, joint = backend == "cpu", how.joint
        inputs, outputs = (*joint.inputs, *joint.second_inputs), how.joint.program.outputs
        flat = flatten_plan(how, cpu)
        how.cache[key] = _simulated(flat, inputs, outputs, cpu, len(joint.second_inputs))
    return how.cache[key]


def _simulated(flat: Flat, inputs: Sequence[Atom], outputs: Sequence[Atom], cpu: bool,
               n_seconds: int) -> Liveness:  # fmt: skip
    line = _Line(flat, cpu, frozenset(flat.outputs), frozenset())
    line.lend_outputs()
    live, saved = line.run(line.second_from(flat.inputs[len(flat.inputs) - n_seconds :]))
    size = lambda atoms: sum(aval_bytes(v.aval) for v in atoms)
    return Liveness(size(inputs), size(outputs), tuple(live), tuple(saved), tuple(line.steps))


class _Line:
    """Written steps in the order in which they run.

    `outside` are values of which the memory is counted elsewhere; `slices` inputs that are a
    trip's part of a scanned input.
    """

    def __init__(self, flat: Flat, cpu: bool, outside: frozenset[Cell], slices: frozenset[Cell]):
        self.cpu, self.outside, self.slices = cpu, outside, slices
        fusion = Fusion(flat)
        order = _breadth_first(fusion) if cpu else range(len(fusion.steps))
        self.steps = [fusion.steps[i] for i in order]
        self.reads = [fusion.reads[i] for i in order]
        self.outputs = frozenset(flat.outputs)
        self.born = {c: i for i, s in enumerate(self.steps) for c in s.makes}
        self.last = {c: i for i, cells in enumerate(self.reads) for c in cells}
        self.bytes = {c: c.bytes for c in self.born if c not in outside}
        self.bytes |= {c: c.bytes if fusion.sliced(c) else 0 for c in slices}

    def second_from(self, seconds: Sequence[Cell]) -> int:
        """The place of the first step that depends on one of `seconds`."""
        moving = set(seconds)
        for i, (step, cells) in enumerate(zip(self.steps, self.reads, strict=True)):
            if not moving.isdisjoint(cells):
                return i
            moving.update(step.makes if not moving.isdisjoint(step.reads) else ())
        return len(self.steps)

    def lend_outputs(self) -> None:
        """Let values live in the buffers of outputs that are not yet written."""
        rooms = sorted(
            (c for c in self.born if c in self.outside and c.bytes >= _SMALL),
            key=lambda c: (-c.bytes, self.born[c]),
        )
        taken: dict[Cell, list[tuple[int, int]]] = {c: [] for c in rooms}
        sizes = [-c.bytes for c in rooms]
        for cell in sorted(self.bytes, key=lambda c: -c.bytes):
            if cell.bytes < _SMALL:
                break
            start, end = self.born[cell], self.last.get(cell, self.born[cell])
            large = rooms[: bisect.bisect_right(sizes, -cell.bytes)]
            for room in large[-_TRIES:]:
                free = end < self.born[room] and all(end < a or b < start for a, b in taken[room])
                if free:
                    taken[room].append((start, end))
                    self.bytes[cell] = 0
                    break

    def run(self, second: int) -> tuple[list[int], list[int]]:
        """Live bytes at each step, and those of them that wait for the second part."""
        live: list[int] = []
        now = 0
        for i, (step, cells) in enumerate(zip(self.steps, self.reads, strict=True)):
            now += sum(self.bytes[c] for c in cells if c in self.slices and self._first(c, i))
            made = sum(self.bytes.get(c, 0) for c in step.makes)
            live.append(now + made - self._replaced(step, i) + self._inside(step))
            now += sum(self.bytes.get(c, 0) for c in step.makes if self._stays(c))
            for c in cells:
                if self.last[c] == i and c in self.bytes and c not in self.outputs:
                    now -= self.bytes[c]
        return live, self._waiting(second)

    def _first(self, cell: Cell, i: int) -> bool:
        if cell in self.born:
            return False
        self.born[cell] = i
        return True

    def _stays(self, cell: Cell) -> bool:
        return cell in self.last or cell in self.outputs

    def _replaced(self, step: Step, i: int) -> int:
        """Bytes of an operand that ends here and whose place an elementwise result takes."""
        if not fuses(step):
            return 0
        made = self.bytes.get(step.makes[0], 0)
        ends = (
            c for c in self.reads[i]
            if self.last[c] == i and c not in self.outputs and c not in self.slices
        )  # fmt: skip
        return made if any(self.bytes.get(c) == made for c in ends) else 0

    def _inside(self, step: Step) -> int:
        """What runs in a step needs beside its operands and results, at its peak."""
        if step.does is scan_p:
            params = step.eqn.params
            return _peak(program(params["jaxpr"]), self.cpu, sum(scan_counts(params)))
        if traits(step.does).foreign:
            return 0
        inner = (_peak(program(j), self.cpu, None) for j in jaxprs_of(step.eqn))
        return max(inner, default=0)

    def _waiting(self, second: int) -> list[int]:
        """Bytes at each step that were made before the step `second` and are read from it on."""
        change = collections.Counter[int]()
        for cell, n in self.bytes.items():
            start, end = self.born.get(cell, 0), self.last.get(cell, -1)
            if start < second <= end:
                change[start] += n
                change[end + 1] -= n
        total, waiting = 0, []
        for i in range(len(self.steps)):
            total += change[i]
            waiting.append(total)
        return waiting


def _peak(prog: Program, cpu: bool, n_fixed: int | None) -> int:
    """The peak inside a body; its inputs after the first `n_fixed` are slices (None: none are)."""
    key = "peak", cpu, n_fixed
    if key not in prog.cache:
        flat = flatten(prog, cpu)
        slices = flat.inputs[n_fixed:] if n_fixed is not None else ()
        line = _Line(flat, cpu, frozenset(), frozenset(slices))
        live, _ = line.run(0)
        made = sum(line.bytes.get(c, 0) for c in set(flat.outputs))
        prog.cache[key] = max(0, max(live, default=0) - (0 if n_fixed is not None else made))
    return prog.cache[key]


def _breadth_first(fusion: Fusion) -> list[int]:
    """Steps as a queue runs them: each is put at its end when its last operand is there."""
    maker = {c: i for i, s in enumerate(fusion.steps) for c in s.makes}
    readers: list[list[int]] = [[] for _ in fusion.steps]
    missing = [0] * len(fusion.steps)
    for i, cells in enumerate(fusion.reads):
        before = {maker[c] for c in cells if c in maker}
        missing[i] = len(before)
        for j in before:
            readers[j].append(i)
    order = [i for i, n in enumerate(missing) if not n]
    for i in order:
        for j in readers[i]:
            missing[j] -= 1
            if not missing[j]:
                order.append(j)
    return order
