"""Simulate the compiler's memory, from the program alone: the live bytes at each step.

This is xform's only model of peak memory. It takes the values that are written to memory
(`fusion`) in the execution order of the backend. It adds up their bytes, from the step that makes a
value to its last reader. Buffers are shared as XLA shares them:

- The buffer of an output holds other values before the output is written. The largest values get
  such a buffer first.
- An elementwise result takes the buffer of an operand that is not read later.
- The result of a loop takes the buffer of its initial value. The arrays into which a loop stacks
  its results exist from the start of the program.
- An iteration of a loop needs its own peak, beside the values that it carries, reads and stacks.
- All other values are placed in a heap, which has gaps (`heap`).

XLA:CPU runs operations breadth first, as soon as their operands are available. Other backends try a
few orders and use the one with the lowest peak (`orders`). On-chip values are not counted.
Source: XLA's `buffer_assignment.cc`, `heap_simulator.cc` and `hlo_memory_scheduler.cc`.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from xform._jax import JaxprEqn, jaxprs_of, scan_p, while_p
from xform.interpret.joint import Schedule
from xform.interpret.node import gather
from xform.planner.simulate.breadth_first import breadth_first_order
from xform.planner.simulate.flat import flatten, flatten_iteration, loop_counts
from xform.planner.simulate.gain import GainFusion
from xform.planner.simulate.gemms import merge_and_split
from xform.planner.simulate.heap import HeapValue, heap_bytes
from xform.planner.simulate.loop_fusion import LoopFusion
from xform.planner.simulate.orders import least_memory_order
from xform.planner.simulate.parts import flatten_schedule
from xform.planner.simulate.profiles import Profile, profile
from xform.planner.simulate.steps import FlatProgram, FlatStep, FlatValue
from xform.program.fingerprint import fingerprint
from xform.program.ir import Atom, Mask, Program, program, seldom_collected
from xform.storage.bounded_cache import BoundedCache

# The peaks of loop bodies. Many plans of one program have equal loop bodies.
_BODY_PEAKS: BoundedCache[tuple[str, int, int, str], int] = BoundedCache(4_096)


@dataclasses.dataclass(frozen=True)
class Liveness:
    """Live bytes on each device, over the steps of a program.

    Attributes:
      argument_bytes: bytes of the inputs.
      output_bytes: bytes of the outputs, with the table of pointers if there are several.
      live: temporary bytes while each step runs, its results included.
      saved: the part of `live` that the forward part made and the backward part still reads. The
        backward part begins at the first step that depends on a cotangent.
      temp_bytes: bytes of the heap of temporary values: the largest of `live`, plus gaps.
    """

    argument_bytes: int
    output_bytes: int
    live: tuple[int, ...]
    saved: tuple[int, ...]
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        """Arguments, outputs and temporary memory: the total that a `MemoryReport` states."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes


def simulate(prog: Program, backend: str, n_seeds: int = 0, over: Mask = ()) -> Liveness:
    """Return the simulated Liveness of a program on one device.

    Args:
      prog: the program.
      backend: "cpu", "gpu" or "tpu".
      n_seeds: how many of the last inputs are cotangents. The backward part depends on them.
      over: for each output, whether it overwrites a donated argument. Such an output is not
        counted.

    Cost: near linear in equations; each loop body is simulated once.
    """
    by = profile(backend)
    flat = flatten(prog, by, n_seeds)
    return _simulate_flat(flat, prog.inputs, prog.outputs, by, n_seeds, over)


def liveness(schedule: Schedule, backend: str) -> Liveness:
    """Return the Liveness of both parts of a Schedule in one program.

    The result is cached on the Schedule. Only loops and calls are traced, once each, with their
    residuals.
    """
    key = "liveness", backend
    if key not in schedule.cache:
        by, joint = profile(backend), schedule.joint
        inputs, outputs = (*joint.inputs, *joint.seeds), joint.program.outputs
        with seldom_collected():
            flat = flatten_schedule(schedule, by)
            schedule.cache[key] = _simulate_flat(flat, inputs, outputs, by, len(joint.seeds))
    return schedule.cache[key]


def _simulate_flat(flat: FlatProgram, inputs: Sequence[Atom], outputs: Sequence[Atom], by: Profile,
                   n_seeds: int, over: Mask = ()) -> Liveness:  # fmt: skip
    timeline = _Timeline(flat, by, frozenset(flat.outputs), {})
    over = over or (False,) * len(outputs)
    timeline.lend_outputs(frozenset(gather(flat.outputs, over)))
    seeds = flat.inputs[len(flat.inputs) - n_seeds :]
    timeline.run()
    size = lambda atoms: sum(by.bytes(v.aval) for v in atoms)
    return Liveness(
        size(inputs),
        size(v for v, donated in zip(outputs, over, strict=True) if not donated)
        + by.table_bytes(len(outputs)),
        tuple(timeline.live()),
        tuple(timeline.live_across(timeline.first_backward_step(seeds))),
        timeline.heap(),
    )


class _Timeline:
    """The steps whose results are written to memory, in execution order, and where values lie.

    Args:
      flat: the program.
      by: the facts about the compiler.
      outside: values whose memory is counted elsewhere: the outputs.
      carried: for the body of a loop, each new state and the old state whose buffer it may take.
    """

    def __init__(self, flat: FlatProgram, by: Profile, outside: frozenset[FlatValue],
                 carried: Mapping[FlatValue, FlatValue]) -> None:  # fmt: skip
        self.by = by
        flat = merge_and_split(flat, by)
        fusion = (GainFusion if by.kernel_bytes else LoopFusion)(flat, by)
        self.fusion, self.base = fusion, (base := fusion.base)
        if by.breadth_first:
            groups = breadth_first_order(fusion, flat.inputs)
        else:
            inside = lambda g: self._inside(g.root)
            groups = least_memory_order(fusion.groups, base, flat.outputs, inside)
        self.groups = [g for g in groups if g.root.results[0] not in base]
        self.steps = [g.root for g in self.groups]
        self.reads = [list(dict.fromkeys(base.get(c, c) for c in g.reads)) for g in self.groups]
        self.outputs = frozenset(base.get(c, c) for c in flat.outputs)
        self.outside = frozenset(base.get(c, c) for c in outside)
        self.born = {c: i for i, s in enumerate(self.steps) for c in s.results}
        self.last = {c: i for i, values in enumerate(self.reads) for c in values}
        self.bytes = {c: c.bytes for c in self.born if c not in self.outside}
        # When XLA visits each step. This makes no difference in the body of a loop.
        self.place = {s: i for i, s in enumerate(self.steps)}
        self.output_uses = self._find_output_uses()
        for new, old in carried.items():
            value, first = base.get(new, new), base.get(old, old)
            if value in self.bytes and self._follows(value, first):
                self.bytes[value] = 0

    def _find_output_uses(self) -> dict[FlatValue, int]:
        """For each value that is counted elsewhere, the first step that uses its buffer."""
        uses: dict[FlatValue, int] = {}
        for i, step in enumerate(self.steps):
            free = self._replaceable(i) if step.starts else set[FlatValue]()
            for j, c in enumerate(step.results):
                if c not in self.outside:
                    continue
                start = self._start(step, j) if step.starts else None
                if start in free and self.bytes.get(start) == c.bytes:
                    free.remove(start)
                    uses[c] = self.born[start]
                    self.bytes[start] = 0
                else:
                    uses[c] = i
        return uses

    def _follows(self, new: FlatValue, old: FlatValue) -> bool:
        """Whether `new` can take the buffer of `old`.

        It can if `old` is not read any more, or if its last reader makes `new` element by element.
        """
        born, last = self.born[new], self.last.get(old, -1)
        return last < born or (last == born and old in self._replaceable(born))

    def first_backward_step(self, seeds: Sequence[FlatValue]) -> int:
        """Return the number of the first step that depends on one of `seeds`."""
        moving = set(seeds)
        for i, (step, values) in enumerate(zip(self.steps, self.reads, strict=True)):
            if not moving.isdisjoint(values):
                return i
            moving.update(step.results if not moving.isdisjoint(step.operands) else ())
        return len(self.steps)

    def lend_outputs(self, over: frozenset[FlatValue]) -> None:
        """Place values in the buffers of outputs that are not yet written.

        Outputs in `over` overwrite an argument that is still read, so their buffers are not used.
        The largest values are placed first. A value takes the buffer of one of its operands, or
        else the smallest free buffer.
        """
        arguments = {self.base.get(c, c) for c in over}
        self.place = self.fusion.fused_place()
        place = {c: self.place[s] for s in self.steps for c in s.results}
        buffers = sorted(self.output_uses.keys() - arguments, key=lambda c: (-c.bytes, place[c]))
        sizes = [-c.bytes for c in buffers]
        written = np.array([self.output_uses[c] for c in buffers])
        occupied = {c: [(self.output_uses[c], len(self.steps), c)] for c in buffers}
        buffer_of = {c: c for c in buffers}
        families = self._families()
        for value in sorted(families, key=lambda c: (-c.bytes, place[c])):
            family, start = families[value], self.born[value]
            last = max(family, key=lambda c: self.last.get(c, start))
            end = self.last.get(last, start)
            near = [buffer_of[c] for c in self.reads[start] if c in buffer_of]
            if len(near) > 1:
                near = [buffer_of[c] for c in self._operands(start) if c in buffer_of]
            free = np.flatnonzero(written[: bisect.bisect_right(sizes, -value.bytes)] >= end)
            for buffer in (*near, *(buffers[i] for i in free[::-1].tolist())):
                if value.bytes <= buffer.bytes and self._admits(occupied[buffer], start, end, last):
                    occupied[buffer].append((start, end, last))
                    self.bytes.update(dict.fromkeys(family, 0))
                    buffer_of.update(dict.fromkeys(family, buffer))
                    break

    def _admits(
        self, others: Sequence[tuple[int, int, FlatValue]], start: int, end: int, last: FlatValue
    ) -> bool:
        """Whether a buffer can hold another family of values from step `start` to step `end`.

        `others` are the families in it: first step, last step, and the last value of each. `last`
        is the last value of the new family. Two families may meet at one step, if the step computes
        the later value element by element from the earlier one.
        """
        for a, b, old in others:
            if not (
                end < a
                or b < start
                or (end == a and last in self._replaceable(a))
                or (b == start and old in self._replaceable(start))
            ):
                return False
        return True

    def _families(self) -> dict[FlatValue, list[FlatValue]]:
        """Values that share a buffer, by the first: loop results and their initial values."""
        head = {c: c for c in self.bytes}
        for i, step in enumerate(self.steps):
            free = self._replaceable(i) if step.starts else set[FlatValue]()
            for j, c in enumerate(step.results if step.starts else ()):
                start = self._start(step, j)
                if start in free and c in head and self.bytes.get(start) == c.bytes:
                    free.remove(start)
                    head[c] = head[start]
        families: dict[FlatValue, list[FlatValue]] = {}
        for c, first in head.items():
            families.setdefault(first, []).append(c)
        return families

    def run(self) -> None:
        """Find the steps during which each value lives, and its buffer.

        A value gets a buffer of its own, or takes the buffer of an operand that ends there.
        """
        ends = len(self.steps) - 1
        buffer_of: dict[FlatValue, int] = {}
        self.starts, self.ends, self.sizes = list[int](), list[int](), list[int]()
        self.values = list[HeapValue]()
        for i, step in enumerate(self.steps):
            free = self._replaceable(i).intersection(buffer_of)
            for j, c in enumerate(step.results):
                if not self.bytes.get(c):
                    continue
                end = ends if c in self.outputs else self.last.get(c, i)
                others = [self._start(step, j)] if step.starts else free and self._operands(i)
                donor = next((x for x in others if x in free and x.bytes == c.bytes), None)
                if donor is not None:
                    free.remove(donor)
                    buffer_of[c] = buffer_of[donor]
                    self.ends[buffer_of[c]] = end
                else:
                    buffer_of[c] = self._add_buffer(i, end, self.bytes[c])
                self.values.append(HeapValue(buffer_of[c], i, end, self.place[step]))
            if n := self._inside(step):
                self.values.append(HeapValue(self._add_buffer(i, i, n), i, i, self.place[step]))
        if self.by.on_chip_bytes:
            self._keep_on_chip()

    def _add_buffer(self, start: int, end: int, size: int) -> int:
        """Add a buffer that is in use from step `start` to step `end`. Return its number."""
        self.starts.append(start)
        self.ends.append(end)
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _keep_on_chip(self) -> None:
        """Keep values in the on-chip memory while they live, the largest first."""
        used = np.zeros(len(self.steps), np.int64)
        for k in sorted(range(len(self.sizes)), key=lambda k: -self.sizes[k]):
            during = slice(self.starts[k], self.ends[k] + 1)
            if used[during].max() + self.sizes[k] <= self.by.on_chip_bytes:
                used[during] += self.sizes[k]
                self.sizes[k] = 0

    def live(self) -> list[int]:
        """Return the live bytes at each step."""
        change = np.zeros(len(self.steps) + 1, np.int64)
        np.add.at(change, self.starts, self.sizes)
        np.add.at(change, np.asarray(self.ends, np.int64) + 1, -np.asarray(self.sizes, np.int64))
        return change.cumsum()[:-1].tolist()

    def heap(self) -> int:
        """Return the bytes of the heap of all values, with the gaps between them."""
        return heap_bytes(self.sizes, self.values, max(self.live(), default=0))

    def _replaceable(self, i: int) -> set[FlatValue]:
        """The operands of step `i` that end there and whose buffer a result may take."""
        step = self.steps[i]
        values = step.starts or self.groups[i].replaceable()
        bases = {self.base.get(c, c) for c in values}
        return {c for c in bases if self.last.get(c) == i and c not in self.outputs}

    def _operands(self, i: int) -> list[FlatValue]:
        """The values that step `i` reads, in XLA's order if that is known."""
        if not self.by.breadth_first:
            return self.reads[i]
        return [self.base.get(c, c) for c in self.groups[i].operands(self.fusion.place)]

    def _start(self, step: FlatStep, j: int) -> FlatValue | None:
        """The initial value of result `j` of a loop."""
        value = step.starts[j] if j < len(step.starts) else None
        return self.base.get(value, value) if value else None

    def _inside(self, step: FlatStep) -> int:
        """What runs in a step needs beside its operands and results, at its peak."""
        if step.primitive is not step.eqn.primitive or step.traits.foreign:
            return 0
        if step.primitive in (scan_p, while_p):
            return _iteration_peak(step.eqn, self.by)
        inner = (_body_peak(program(j), self.by) for j in jaxprs_of(step.eqn))
        return max(inner, default=0)

    def live_across(self, backward: int) -> list[int]:
        """Return the bytes at each step of values that live across step number `backward`.

        These were made before that step, and are read at it or after it.
        """
        change = collections.Counter[int]()
        for value, n in self.bytes.items():
            start, end = self.born.get(value, 0), self.last.get(value, -1)
            if start < backward <= end:
                change[start] += n
                change[end + 1] -= n
        total, waiting = 0, []
        for i in range(len(self.steps)):
            total += change[i]
            waiting.append(total)
        return waiting


def _iteration_peak(eqn: JaxprEqn, by: Profile) -> int:
    """The peak of an iteration of a loop, beside the values that it carries, reads and stacks."""
    consts, carried = loop_counts(eqn)
    if eqn.primitive is while_p:
        consts = eqn.params["body_nconsts"]
    prog = program(eqn.params["jaxpr" if eqn.primitive is scan_p else "body_jaxpr"])
    key = by.name, consts, carried, fingerprint(prog)
    if key not in _BODY_PEAKS:
        n = consts + carried
        flat = flatten_iteration(prog, by, eqn, len(prog.inputs) - n, len(prog.outputs) - carried)
        pairs = zip(flat.outputs, flat.inputs[consts:n], strict=False)
        timeline = _Timeline(flat, by, frozenset(), dict(pairs))
        timeline.run()
        _BODY_PEAKS[key] = max(timeline.live(), default=0)
    return _BODY_PEAKS[key]


def _body_peak(prog: Program, by: Profile) -> int:
    """The peak of a called program, without its results."""
    key = "body", by.name
    if key not in prog.cache:
        timeline = _Timeline(flatten(prog, by), by, frozenset(), {})
        timeline.run()
        results = sum(timeline.bytes.get(c, 0) for c in timeline.outputs)
        prog.cache[key] = max(0, max(timeline.live(), default=0) - results)
    return prog.cache[key]
