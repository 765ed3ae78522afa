"""Rewrite matrix products as XLA:GPU does: merge small products, and split narrow ones.

Small products that share an operand and do not depend on each other are merged into one. Their
other operands are concatenated, and each result is a slice of the merged product. A product with
few rows and columns is split along its summed axis. The parts are written to memory and then added.
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

# The numbers of parts into which a product may be split; 1 leaves it whole.
_PART_COUNTS = tuple(2**i for i in range(12))
# One processor computes a tile of at most this many rows and columns at a time.
_TILE = 128


def merge_and_split(flat: FlatProgram, profile: Profile) -> FlatProgram:
    """Return the program with its matrix products merged and split as on the backend of `profile`.

    The steps of `flat` are changed in place. If the backend neither merges nor splits products,
    `flat` itself is returned.
    """
    return _Products(flat, profile).rewrite() if profile.merge_bytes else flat


class _Products:
    """Merges and splits the products of a program.

    Attributes:
      _sizes: the batch size, rows, summed elements and columns of each product.
      _new: the steps that the rewriting adds.
      _removed: the products that were merged.
      _bit: for each product that shares an operand, an integer with one bit. A set of products is
        the sum of their bits.
      _before: for each product that shares an operand, the set of products that it depends on.
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
        self._find_dependences()
        values = (x for s in self._flat.steps for x in s.results)
        for value in [*self._flat.inputs, *values]:
            if _count_products(value) > 1:
                for summed_last in (True, False):
                    products = (s for s in value.readers if s in self._before)
                    self._merge(
                        [s for s in products if _sums_last_axis(s, value) is summed_last], value
                    )
        for step in tuple(self._sizes):
            self._split(step)
        kept = [s for s in self._flat.steps if s not in self._removed]
        return _sort_steps(self._flat, (*kept, *self._new)) if self._new else self._flat

    def _find_dependences(self) -> None:
        """Find which products depend on which others: set `_bit` and `_before`."""
        sharing = [s for s in self._sizes if any(_count_products(x) > 1 for x in s.operands)]
        self._bit = {s: 1 << i for i, s in enumerate(sharing)}
        self._before: dict[FlatStep, int] = {}
        products: dict[FlatValue, int] = {}  # for each value, the products that it depends on
        for step in self._flat.steps:
            bits = 0
            for value in step.operands:
                bits |= products.get(value, 0)
            if step in self._bit:
                self._before[step] = bits
                bits |= self._bit[step]
            if bits:
                products.update(dict.fromkeys(step.results, bits))

    def _merge(self, steps: list[FlatStep], shared: FlatValue) -> None:
        """Merge small products that share an operand, if they do not depend on each other."""
        while len(steps) > 1:
            first = steps[0]
            merged, bits, before = [first], self._bit[first], self._before[first]
            side = first.operands.index(shared)  # 0 for the left operand, 1 for the right
            for step in steps[1:]:
                same_side = step.operands.index(shared) == side or self._sizes[step][0] == 1
                smaller = min(_count_bytes([step]), _count_bytes(merged))
                is_small = smaller <= self._profile.merge_bytes
                depends = before & self._bit[step] or self._before[step] & bits
                if same_side and is_small and not depends:
                    merged.append(step)
                    bits |= self._bit[step]
                    before |= self._before[step]
            steps = [s for s in steps if s not in merged]
            if len(merged) > 1:
                self._replace_by_one(merged, shared)
                for step, depends_on in self._before.items():
                    if depends_on & bits:
                        self._before[step] = depends_on | bits | before

    def _replace_by_one(self, merged: list[FlatStep], shared: FlatValue) -> None:
        """Replace products that share an operand by one. Their results become slices of it."""
        others = [s.operands[1 - s.operands.index(shared)] for s in merged]
        n_bytes = sum(s.results[0].bytes for s in merged)
        n_elements = sum(math.prod(s.results[0].shape) for s in merged)
        joined = FlatValue(n_bytes, "computed", (n_elements,))
        product = self._add_step(dot_general_p, merged[0], [shared, *others], [joined])
        batch, _, n_summed, _ = self._sizes[merged[0]]
        rows = math.prod(shared.shape) // (batch * n_summed)
        self._sizes[product] = batch, rows, n_summed, n_elements // (batch * rows)
        for step in merged:
            del self._before[step], self._sizes[step]
            self._removed.add(step)
            for value in dict.fromkeys(step.operands):
                value.readers.remove(step)
            self._add_step(lax.slice_p, step, [joined], step.results)

    def _split(self, step: FlatStep) -> None:
        """Split a product into parts that are written and added, if that takes less time."""
        n_parts = _fastest_part_count(*self._sizes[step], self._profile)
        if n_parts > 1:
            (value,) = step.results
            size = 4 * n_parts * math.prod(value.shape)
            step.results = [FlatValue(size, "computed", (n_parts, *value.shape), step)]
            self._add_step(lax.reduce_sum_p, step, step.results, [value])

    def _add_step(
        self, prim: Primitive, like: FlatStep, operands: list[FlatValue], results: list[FlatValue]
    ) -> FlatStep:
        """Add a step that comes from the equation of the step `like`, and return it."""
        step = FlatStep(prim, traits(prim), like.eqn, list(operands), list(results))
        for value in results:
            value.maker = step
        for value in dict.fromkeys(operands):
            value.readers.append(step)
        self._new[step] = None
        return step


def _sizes(step: FlatStep) -> tuple[int, int, int, int]:
    """Return the batch size, rows, summed elements and columns of a product."""
    batch, n_summed = batch_and_summed(step.eqn)
    rows, columns = (math.prod(x.shape) // max(1, batch * n_summed) for x in step.operands)
    return batch, rows, n_summed, columns


def _sums_last_axis(step: FlatStep, operand: FlatValue) -> bool:
    """Return whether a product sums over the last axis of this operand."""
    return (
        step.left_sums_last_axis if step.operands[0] is operand else not step.right_sums_first_axis
    )


def _count_products(value: FlatValue) -> int:
    """Return how many products read a value."""
    return sum(s.primitive is dot_general_p for s in value.readers)


def _count_bytes(steps: list[FlatStep]) -> int:
    """Return the bytes of the operands and results of products, counting each value once."""
    return sum(x.bytes for x in dict.fromkeys(x for s in steps for x in (*s.operands, *s.results)))


def _sort_steps(flat: FlatProgram, steps: Iterable[FlatStep]) -> FlatProgram:
    """Return the program `flat` with these steps, each after the steps that make its operands."""
    done: dict[FlatStep, None] = {}
    for step in steps:
        stack = [step]
        while stack:
            missing = [x.maker for x in stack[-1].operands if x.maker and x.maker not in done]
            if missing:
                stack += missing
            else:
                done[stack.pop()] = None
    return FlatProgram(flat.inputs, tuple(done), flat.outputs)


def _fastest_part_count(
    batch: int, rows: int, n_summed: int, columns: int, profile: Profile
) -> int:
    """Return the number of parts with the least estimated time.

    `batch`, `rows`, `n_summed` and `columns` are the sizes of the product. The formula and its
    constants are XLA's. It assumes elements of four bytes.
    """
    tile_rows, tile_columns = min(rows, _TILE), min(columns, _TILE)
    n_tiles = -(-rows // _TILE) * -(-columns // _TILE)
    tiles_at_once = profile.processors * _TILE * _TILE / (tile_rows * tile_columns)
    read, written = 4 * batch * n_summed * (rows + columns), 4 * batch * rows * columns

    def time(n_parts: int) -> float:
        waves = max(1.0, batch * n_parts * n_tiles / tiles_at_once)
        arithmetic = 100.0 * 2 * tile_rows * tile_columns * -(-n_summed // n_parts) * waves
        memory = 0.194136 * (read + n_parts * written)
        addition = 4.36e7 + 193.1384 * (n_parts + 1) * written if n_parts > 1 else 0.0
        return max(arithmetic, memory) + addition

    return min(_PART_COUNTS, key=time)
