"""Simulate which buffer each value of a program lies in, and when each buffer is in use.

A `Timeline` takes the operations whose results are written to memory (`fusion.py`) in the execution
order of the backend. Buffers are shared as XLA shares them:

- The buffer of an output holds other values before the output is written. The largest values get
  such a buffer first.
- The result of an elementwise operation takes the buffer of an operand that is not read later.
- The result of a loop takes the buffer of its initial value. The arrays into which a loop stacks
  its results exist from the start of the program. A result of a conditional takes the buffer of an
  operand that a branch returns unchanged.
- A loop also needs the peak of one iteration. The values that it carries, reads and stacks are not
  counted in that peak, because they have buffers outside the loop.
- All other values are placed in a heap, which has gaps (`heap.py`).

Source: XLA's `buffer_assignment.cc`, `heap_simulator.cc` and `hlo_memory_scheduler.cc`.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from xform._jax import JaxprEqn, jaxprs_of
from xform.planner.simulate.breadth_first import breadth_first_order
from xform.planner.simulate.flat import flatten, flatten_iteration, kept_operands
from xform.planner.simulate.gain import GainFusion
from xform.planner.simulate.gemms import merge_and_split
from xform.planner.simulate.heap import HeapValue, heap_bytes
from xform.planner.simulate.loop_fusion import LoopFusion
from xform.planner.simulate.orders import least_memory_order
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import FlatProgram, FlatStep, FlatValue
from xform.program.dimensions import SampledCache
from xform.program.fingerprint import fingerprint
from xform.program.flow import Body, Flow
from xform.program.ir import Program, program
from xform.registry.table import flow_of

# The peaks of iterations of loops. Many plans of one program have equal loop bodies.
_ITERATION_PEAKS = SampledCache(4_096)


class Timeline:
    """The steps that write to memory, in execution order, and the buffer of each value.

    Steps are numbered in that order. A view, such as a reshape, counts as the value in whose memory
    it lies.

    Args:
      flat: the program.
      profile: the facts about the compiler.
      counted_elsewhere: values whose memory is not counted here: the outputs of a whole program.
      carried: for the body of a loop, each new state and the old state whose buffer it may take.

    Attributes:
      groups, steps: the fusion groups, and the last step of each, which writes its result.
      reads: the values that each step reads.
      born, last: for each value, the number of the step that computes it, and of its last reader.
      bytes: the bytes of each value; 0 if it lies in the buffer of another value.
      output_uses: for each value counted elsewhere, the first step that uses its buffer.
    """

    def __init__(self, flat: FlatProgram, profile: Profile, counted_elsewhere: frozenset[FlatValue],
                 carried: Mapping[FlatValue, FlatValue]) -> None:  # fmt: skip
        self.profile = profile
        flat = merge_and_split(flat, profile)
        self.fusion = (GainFusion if profile.kernel_bytes else LoopFusion)(flat, profile)
        self.base_of = base_of = self.fusion.base_of
        if profile.breadth_first:
            groups = breadth_first_order(self.fusion, flat.inputs)
        else:
            inner_bytes = lambda g: self._inner_bytes(g.root)
            groups = least_memory_order(self.fusion.groups, base_of, flat.outputs, inner_bytes)
        self.groups = [g for g in groups if g.root.results[0] not in base_of]
        self.steps = [g.root for g in self.groups]
        self.reads = [list(dict.fromkeys(base_of.get(x, x) for x in g.reads)) for g in self.groups]
        self.outputs = frozenset(base_of.get(x, x) for x in flat.outputs)
        self.counted_elsewhere = frozenset(base_of.get(x, x) for x in counted_elsewhere)
        self.born = {x: i for i, s in enumerate(self.steps) for x in s.results}
        self.last = {x: i for i, values in enumerate(self.reads) for x in values}
        self.bytes = {x: x.bytes for x in self.born if x not in self.counted_elsewhere}
        # The number of each step in XLA's visiting order, which `reuse_output_buffers` sets for a
        # whole program. The body of a loop does not need it, and keeps these numbers.
        self.visit_index = {s: i for i, s in enumerate(self.steps)}
        self.output_uses = self._find_output_uses()
        for new, old in carried.items():
            new_value, old_value = base_of.get(new, new), base_of.get(old, old)
            if new_value in self.bytes and self._can_follow(new_value, old_value):
                self.bytes[new_value] = 0

    def _find_output_uses(self) -> dict[FlatValue, int]:
        """Return for each value counted elsewhere the first step that uses its buffer.

        If the value is the result of a loop, its buffer may hold the initial value of the loop
        before. Then the first use is the step that computes the initial value.
        """
        uses: dict[FlatValue, int] = {}
        for i, step in enumerate(self.steps):
            replaceable = self._replaceable(i) if step.initial_values else set[FlatValue]()
            for j, value in enumerate(step.results):
                if value not in self.counted_elsewhere:
                    continue
                initial = self._initial_value(step, j) if step.initial_values else None
                if initial in replaceable and self.bytes.get(initial) == value.bytes:
                    replaceable.remove(initial)
                    uses[value] = self.born[initial]
                    self.bytes[initial] = 0
                else:
                    uses[value] = i
        return uses

    def _can_follow(self, new: FlatValue, old: FlatValue) -> bool:
        """Return whether `new` can take the buffer of `old`.

        It can if `old` is not read any more, or if its last reader computes `new` element by
        element.
        """
        born, last = self.born[new], self.last.get(old, -1)
        return last < born or (last == born and old in self._replaceable(born))

    def first_backward_step(self, cotangents: Sequence[FlatValue]) -> int:
        """Return the number of the first step that depends on one of the `cotangents`."""
        dependent = set(cotangents)
        for i, (step, values) in enumerate(zip(self.steps, self.reads, strict=True)):
            if not dependent.isdisjoint(values):
                return i
            dependent.update(step.results if not dependent.isdisjoint(step.operands) else ())
        return len(self.steps)

    def reuse_output_buffers(self, overwriting: frozenset[FlatValue]) -> None:
        """Place values in the buffers of outputs that are not yet written.

        The outputs in `overwriting` overwrite an argument that is still read, so their buffers are
        not used. The largest values are placed first. A value takes the buffer of one of its
        operands, or else the smallest free buffer. A loop's initial value and result form a family
        (`_families`), which is placed as a whole.
        """
        excluded = {self.base_of.get(x, x) for x in overwriting}
        self.visit_index = self.fusion.visit_index_after_fusion()
        visit_index = {x: self.visit_index[s] for s in self.steps for x in s.results}
        order = lambda x: (-x.bytes, visit_index[x])
        buffers = sorted(self.output_uses.keys() - excluded, key=order)
        negative_sizes = [-x.bytes for x in buffers]
        first_uses = np.array([self.output_uses[x] for x in buffers])
        # For each buffer, what it holds one after the other: first step, last step, last value.
        held = {x: [(self.output_uses[x], len(self.steps), x)] for x in buffers}
        buffer_of = {x: x for x in buffers}
        families = self._families()
        for value in sorted(families, key=order):
            family, start = families[value], self.born[value]
            last = max(family, key=lambda x: self.last.get(x, start))
            end = self.last.get(last, start)
            of_operands = [buffer_of[x] for x in self.reads[start] if x in buffer_of]
            if len(of_operands) > 1:
                of_operands = [buffer_of[x] for x in self._operands(start) if x in buffer_of]
            n_large = bisect.bisect_right(negative_sizes, -value.bytes)
            unwritten = np.flatnonzero(first_uses[:n_large] >= end)
            for buffer in (*of_operands, *(buffers[i] for i in unwritten[::-1].tolist())):
                if value.bytes <= buffer.bytes and self._fits(held[buffer], start, end, last):
                    held[buffer].append((start, end, last))
                    self.bytes.update(dict.fromkeys(family, 0))
                    buffer_of.update(dict.fromkeys(family, buffer))
                    break

    def _fits(
        self, held: Sequence[tuple[int, int, FlatValue]], start: int, end: int, last: FlatValue
    ) -> bool:
        """Return whether a buffer can hold another family of values from step `start` to `end`.

        `held` are the families that it holds: first step, last step and last value of each. `last`
        is the last value of the new family. Two families may meet at one step, if that step
        computes the later value element by element from the earlier one.
        """
        for held_start, held_end, held_last in held:
            if not (
                end < held_start
                or held_end < start
                or (end == held_start and last in self._replaceable(held_start))
                or (held_end == start and held_last in self._replaceable(start))
            ):
                return False
        return True

    def _families(self) -> dict[FlatValue, list[FlatValue]]:
        """Return the families of values that share a buffer, by the first value of each.

        The initial value and the result of a loop form a family. Each other value is a family of
        its own.
        """
        head = {x: x for x in self.bytes}
        for i, step in enumerate(self.steps):
            replaceable = self._replaceable(i) if step.initial_values else set[FlatValue]()
            for j, value in enumerate(step.results if step.initial_values else ()):
                initial = self._initial_value(step, j)
                if (
                    initial in replaceable
                    and value in head
                    and self.bytes.get(initial) == value.bytes
                ):
                    replaceable.remove(initial)
                    head[value] = head[initial]
        families: dict[FlatValue, list[FlatValue]] = {}
        for value, first in head.items():
            families.setdefault(first, []).append(value)
        return families

    def assign_buffers(self) -> None:
        """Give each value a buffer of its own, or the buffer of an operand that is not read later.

        Sets the first step, last step and size of each buffer, and `heap_values`.
        """
        n_last = len(self.steps) - 1
        buffer_of: dict[FlatValue, int] = {}
        self.starts, self.ends, self.sizes = list[int](), list[int](), list[int]()
        self.heap_values = list[HeapValue]()
        for i, step in enumerate(self.steps):
            visit_index = self.visit_index[step]
            replaceable = self._replaceable(i).intersection(buffer_of)
            for j, value in enumerate(step.results):
                if not self.bytes.get(value):
                    continue
                end = n_last if value in self.outputs else self.last.get(value, i)
                donors = (
                    [self._initial_value(step, j)]
                    if step.initial_values
                    else replaceable and self._operands(i)
                )
                donor = next(
                    (x for x in donors if x in replaceable and x.bytes == value.bytes), None
                )
                if donor is not None:
                    replaceable.remove(donor)
                    buffer_of[value] = buffer_of[donor]
                    self.ends[buffer_of[value]] = end
                else:
                    buffer_of[value] = self._add_buffer(i, end, self.bytes[value])
                self.heap_values.append(HeapValue(buffer_of[value], i, end, visit_index))
            if size := self._inner_bytes(step):
                buffer = self._add_buffer(i, i, size)
                self.heap_values.append(HeapValue(buffer, i, i, visit_index))
        if self.profile.on_chip_bytes:
            self._move_on_chip()

    def _add_buffer(self, start: int, end: int, size: int) -> int:
        """Add a buffer that is in use from step `start` to step `end`. Return its number."""
        self.starts.append(start)
        self.ends.append(end)
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _move_on_chip(self) -> None:
        """Move buffers into the on-chip memory while there is space, the largest first.

        Their size here becomes 0.
        """
        used = np.zeros(len(self.steps), np.int64)
        for k in sorted(range(len(self.sizes)), key=lambda k: -self.sizes[k]):
            lifetime = slice(self.starts[k], self.ends[k] + 1)
            if used[lifetime].max() + self.sizes[k] <= self.profile.on_chip_bytes:
                used[lifetime] += self.sizes[k]
                self.sizes[k] = 0

    def live_bytes(self) -> list[int]:
        """Return the live bytes at each step."""
        change = np.zeros(len(self.steps) + 1, np.int64)
        np.add.at(change, self.starts, self.sizes)
        np.add.at(change, np.asarray(self.ends, np.int64) + 1, -np.asarray(self.sizes, np.int64))
        return change.cumsum()[:-1].tolist()

    def heap_bytes(self) -> int:
        """Return the bytes of the heap that holds all buffers, with the gaps between them."""
        return heap_bytes(self.sizes, self.heap_values, max(self.live_bytes(), default=0))

    def _replaceable(self, i: int) -> set[FlatValue]:
        """Return the operands of step `i` whose buffer a result may take. It reads them last."""
        step = self.steps[i]
        values = step.initial_values or self.groups[i].replaceable()
        bases = {self.base_of.get(x, x) for x in values if x is not None}
        return {x for x in bases if self.last.get(x) == i and x not in self.outputs}

    def _operands(self, i: int) -> list[FlatValue]:
        """Return the values that step `i` reads, in XLA's order if that is known."""
        if not self.profile.breadth_first:
            return self.reads[i]
        operands = self.groups[i].operands(self.fusion.visit_index)
        return [self.base_of.get(x, x) for x in operands]

    def _initial_value(self, step: FlatStep, j: int) -> FlatValue | None:
        """Return the value whose buffer result `j` of a loop or conditional may take, or None."""
        value = step.initial_values[j] if j < len(step.initial_values) else None
        return self.base_of.get(value, value) if value else None

    def _inner_bytes(self, step: FlatStep) -> int:
        """Return the peak inside a loop, branch or call, without its operands and results."""
        if step.primitive is not step.eqn.primitive or step.traits.foreign:
            return 0
        if (flow := flow_of(step.eqn)) is not None and flow.is_loop:
            return _iteration_peak(step.eqn, flow, self.profile)
        if flow is not None and flow.index is not None:
            kept = kept_operands(flow)
            return max(_branch_peak(body, kept, self.profile) for body in flow.bodies)
        peaks = (_body_peak(program(jaxpr), self.profile, {}) for jaxpr in jaxprs_of(step.eqn))
        return max(peaks, default=0)

    def live_bytes_across(self, boundary: int) -> list[int]:
        """Return for each step the live bytes of the values that cross step number `boundary`.

        These are computed before that step, and read at it or after it.
        """
        change = collections.Counter[int]()
        for value, size in self.bytes.items():
            start, end = self.born.get(value, 0), self.last.get(value, -1)
            if start < boundary <= end:
                change[start] += size
                change[end + 1] -= size
        return list(itertools.accumulate(change[i] for i in range(len(self.steps))))


def _iteration_peak(eqn: JaxprEqn, flow: Flow, profile: Profile) -> int:
    """Return the peak of one iteration of a loop, without carried, read and stacked values."""
    (run,), n_carried, n_slices = flow.bodies, len(flow.carried), len(flow.scanned)
    body, n_consts = run.program, len(run.operands) - n_carried - n_slices
    key = profile.name, n_consts, n_carried, fingerprint(body)
    if key not in _ITERATION_PEAKS:
        flat = flatten_iteration(body, profile, eqn, n_slices, len(flow.stacked))
        states = flat.inputs[n_consts : n_consts + n_carried]
        carried = dict(zip(flat.outputs, states, strict=False))
        timeline = Timeline(flat, profile, frozenset(), carried)
        timeline.assign_buffers()
        _ITERATION_PEAKS[key] = max(timeline.live_bytes(), default=0)
    return _ITERATION_PEAKS[key]


def _branch_peak(branch: Body, kept: Mapping[int, int], profile: Profile) -> int:
    """Return the peak of a branch, if the results in `kept` take the buffers of those operands."""
    numbers = {k: i for i, k in enumerate(branch.operands)}
    in_branch = {j: numbers[kept[r]] for j, r in enumerate(branch.results) if r in kept}
    return _body_peak(branch.program, profile, in_branch)


def _body_peak(body: Program, profile: Profile, kept: Mapping[int, int]) -> int:
    """Return the peak of a called program or a branch, without its inputs and results.

    `kept` has the results that take the buffer of an input, by number, with the number of that
    input. If a branch cannot compute such a result in place, it needs a buffer of its own.
    """
    key = "body", profile.name, tuple(kept.items())
    if key not in body.cache:
        flat = flatten(body, profile)
        carried = {flat.outputs[j]: flat.inputs[i] for j, i in kept.items()}
        timeline = Timeline(flat, profile, frozenset(), carried)
        timeline.assign_buffers()
        results = {x for j, x in enumerate(flat.outputs) if j not in kept}
        new_results = {timeline.base_of.get(x, x) for x in results}
        result_bytes = sum(timeline.bytes.get(x, 0) for x in new_results)
        body.cache[key] = max(0, max(timeline.live_bytes(), default=0) - result_bytes)
    return body.cache[key]
