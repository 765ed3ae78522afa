"""Matrix products as XLA:GPU runs them: small ones are merged, narrow ones are split.

Small products that share an operand and do not depend on each other are merged. Their other
operands are joined, and each result is a slice of the merged product. A product with few rows and
columns is split along its summed axis. The parts are written to memory and added up.
Source: XLA's `dot_merger.cc` and `splitk_rewriter.cc`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from jax import lax

from xform._jax import Primitive, dot_general_p
from xform.planner.simulate.products import batch_and_summed
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import FlatProgram, FlatStep, FlatValue
from xform.registry.table import traits

# The numbers of parts into which a product may be split.
_PARTS = tuple(2**i for i in range(12))
_TILE = 128


def merge_and_split(flat: FlatProgram, profile: Profile) -> FlatProgram:
    """Return the program with its matrix products merged and split as the backend prim."""
    return _Products(flat, profile).rewrite() if profile.merge_bytes else flat


class _Products:
    """Merges and splits the products of a program.

    `_sizes` holds the batch size, rows, summed elements and columns of each product.
    """

    def __init__(self, flat: FlatProgram, profile: Profile):
        self._flat, self._profile = flat, profile
        sizes = {
            s: _sizes(s)
            for s in flat.steps
            if s.primitive is dot_general_p and len(s.operands) == 2
        }
        self._sizes = {s: size for s, size in sizes.items() if all(size)}
        self._new, self._removed = dict[FlatStep, None](), set[FlatStep]()

    def rewrite(self) -> FlatProgram:
        """Return the program with its products merged, then split."""
        self._before = self._depends()
        values = (c for s in self._flat.steps for c in s.results)
        for value in [*self._flat.inputs, *values]:
            if _products(value) > 1:
                for summed_last in (True, False):
                    products = (s for s in value.readers if s in self._before)
                    self._merge(
                        [s for s in products if _summed_last(s, value) is summed_last], value
                    )
        for step in tuple(self._sizes):
            self._split(step)
        left = [s for s in self._flat.steps if s not in self._removed]
        return _sort_steps(self._flat, (*left, *self._new)) if self._new else self._flat

    def _depends(self) -> dict[FlatStep, int]:
        """For each product that shares an operand, the products that it depends on, as bits."""
        shared = [s for s in self._sizes if any(_products(c) > 1 for c in s.operands)]
        self._bit = {s: 1 << i for i, s in enumerate(shared)}
        products: dict[FlatValue, int] = {}
        before: dict[FlatStep, int] = {}
        for step in self._flat.steps:
            bits = 0
            for c in step.operands:
                bits |= products.get(c, 0)
            if step in self._bit:
                before[step] = bits
                bits |= self._bit[step]
            if bits:
                products.update(dict.fromkeys(step.results, bits))
        return before

    def _merge(self, steps: list[FlatStep], shared: FlatValue) -> None:
        """Merge small products that share an operand, if they are independent of each other."""
        while len(steps) > 1:
            first = steps[0]
            merged, bits, before = [first], self._bit[first], self._before[first]
            side = first.operands.index(shared)
            for step in steps[1:]:
                alike = step.operands.index(shared) == side or self._sizes[step][0] == 1
                small = min(_bytes([step]), _bytes(merged)) <= self._profile.merge_bytes
                depends = before & self._bit[step] or self._before[step] & bits
                if alike and small and not depends:
                    merged.append(step)
                    bits |= self._bit[step]
                    before |= self._before[step]
            steps = [s for s in steps if s not in merged]
            if len(merged) > 1:
                self._join(merged, shared)
                for step, seen in self._before.items():
                    if seen & bits:
                        self._before[step] = seen | bits | before

    def _join(self, merged: list[FlatStep], shared: FlatValue) -> None:
        """Replace products by one product. Their results become slices of it."""
        others = [s.operands[1 - s.operands.index(shared)] for s in merged]
        size = (
            sum(s.results[0].bytes for s in merged),
            sum(math.prod(s.results[0].shape) for s in merged),
        )
        joined = FlatValue(size[0], "made", (size[1],))
        product = self._step(dot_general_p, merged[0], [shared, *others], [joined])
        batch, _, inner, _ = self._sizes[merged[0]]
        own = math.prod(shared.shape) // (batch * inner)
        self._sizes[product] = batch, own, inner, size[1] // (batch * own)
        for step in merged:
            del self._before[step], self._sizes[step]
            self._removed.add(step)
            for c in dict.fromkeys(step.operands):
                c.readers.remove(step)
            self._step(lax.slice_p, step, [joined], step.results)

    def _split(self, step: FlatStep) -> None:
        """Split a product into parts that are written and added up, if that takes less time."""
        parts = _parts(*self._sizes[step], self._profile)
        if parts > 1:
            (value,) = step.results
            size = 4 * parts * math.prod(value.shape)
            step.results = [FlatValue(size, "made", (parts, *value.shape), step)]
            self._step(lax.reduce_sum_p, step, step.results, [value])

    def _step(
        self, prim: Primitive, like: FlatStep, operands: list[FlatValue], results: list[FlatValue]
    ) -> FlatStep:
        step = FlatStep(prim, traits(prim), like.eqn, list(operands), list(results))
        for c in results:
            c.maker = step
        for c in dict.fromkeys(operands):
            c.readers.append(step)
        self._new[step] = None
        return step


def _sizes(step: FlatStep) -> tuple[int, int, int, int]:
    """Batch size, rows, summed elements and columns of a product."""
    batch, inner = batch_and_summed(step.eqn)
    rows, columns = (math.prod(c.shape) // max(1, batch * inner) for c in step.operands)
    return batch, rows, inner, columns


def _summed_last(step: FlatStep, operand: FlatValue) -> bool:
    """Whether the summed axis of an operand is its last."""
    return step.by_rows if step.operands[0] is operand else not step.right_by_rows


def _products(value: FlatValue) -> int:
    """How many products read a value."""
    return sum(s.primitive is dot_general_p for s in value.readers)


def _bytes(steps: list[FlatStep]) -> int:
    """Bytes of products and their operands, each value once."""
    return sum(c.bytes for c in dict.fromkeys(c for s in steps for c in (*s.operands, *s.results)))


def _sort_steps(flat: FlatProgram, steps: Iterable[FlatStep]) -> FlatProgram:
    """The flat program of these steps, each after the steps that make its operands."""
    done: dict[FlatStep, None] = {}
    for first in steps:
        todo = [first]
        while todo:
            late = [c.maker for c in todo[-1].operands if c.maker and c.maker not in done]
            if late:
                todo += late
            else:
                done[todo.pop()] = None
    return FlatProgram(flat.inputs, tuple(done), flat.outputs)


def _parts(batch: int, rows: int, inner: int, columns: int, profile: Profile) -> int:
    """The number of parts of least estimated time, for a product of four-byte numbers."""
    tall, wide = min(rows, _TILE), min(columns, _TILE)
    tiles = -(-rows // _TILE) * -(-columns // _TILE)
    at_once = profile.processors * _TILE * _TILE / (tall * wide)
    read, written = 4 * batch * inner * (rows + columns), 4 * batch * rows * columns

    def cost(parts: int) -> float:
        waves = max(1.0, batch * parts * tiles / at_once)
        compute = 100.0 * 2 * tall * wide * -(-inner // parts) * waves
        memory = 0.194136 * (read + parts * written)
        adding = 4.36e7 + 193.1384 * (parts + 1) * written if parts > 1 else 0.0
        return max(compute, memory) + adding

    return min(_PARTS, key=cost)
