"""Sets of input elements: for each element of a value, the input elements it may depend on.

Each set has a number. A value has an array of these numbers, in its shape, so an operation that
moves data moves the numbers in the same way. Number 0 is the empty set, and 1 the set of all input
elements; the others are rows of a table. A set may contain too many elements, but never too few.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import sparse

from xform.registry.dependence import Rows

EMPTY, ALL, FIRST = 0, 1, 2
# A union with more members than this is not computed: all elements of the value share one set.
MOST = 2**25


@dataclasses.dataclass(frozen=True, eq=False)
class Sets:
    """The sets of a value.

    Attributes:
      ids: the number of each element's set, in the shape of the value.
      table: the sets with numbers from 2 on, as rows; one column for each input element.
    """

    ids: np.ndarray
    table: sparse.csr_array

    @property
    def width(self) -> int:
        """The number of input elements."""
        return self.table.shape[1]

    def at(self, ids: np.ndarray) -> Sets:
        """Sets with the same table and other `ids`."""
        return Sets(ids, self.table)

    @property
    def sizes(self) -> np.ndarray:
        """The number of members of each set, by number of the set."""
        return np.concatenate([[0, self.width], np.diff(self.table.indptr)])


def table_of(rows: Rows, width: int) -> sparse.csr_array:
    """The boolean sparse array of `rows`, with `width` columns."""
    begins, columns = rows
    data = np.ones(len(columns), bool)
    return sparse.csr_array((data, columns, begins), shape=(len(begins) - 1, width))


def inputs(shape: Sequence[int], start: int, width: int) -> Sets:
    """The sets of an input: element `i` depends only on input element `start + i`."""
    n = math.prod(shape)
    table = table_of((np.arange(n + 1), np.arange(start, start + n)), width)
    return _canonical(np.arange(FIRST, FIRST + n).reshape(shape), table)


def together(parts: Sequence[Sets]) -> tuple[list[np.ndarray], sparse.csr_array]:
    """Merge the tables of several values; returns the new numbers of each, and the table."""
    tables = list({id(p.table): p.table for p in parts}.values())
    starts = dict(zip(map(id, tables), np.cumsum([0, *(t.shape[0] for t in tables)]), strict=False))
    ids = [np.where(p.ids < FIRST, p.ids, p.ids + starts[id(p.table)]) for p in parts]
    table = tables[0] if len(tables) == 1 else sparse.vstack(tables, format="csr")
    return ids, sparse.csr_array(table)


def either(parts: Sequence[Sets]) -> Sets:
    """The union of several values' sets, element by element. Shapes are broadcast."""
    shape = np.broadcast_shapes(*(p.ids.shape for p in parts))
    total = parts[0].at(np.broadcast_to(parts[0].ids, shape))
    for part in parts[1:]:
        total = _both(total, part.at(np.broadcast_to(part.ids, shape)))
    return total


def _both(a: Sets, b: Sets) -> Sets:
    (x, y), table = together([a, b])
    ids = np.where(x == EMPTY, y, np.where((y == EMPTY) | (x == y), x, -1))
    ids[(x == ALL) | (y == ALL)] = ALL
    if not (open_ := ids < 0).any():
        return Sets(ids, table)
    n = table.shape[0] + FIRST
    pairs, inverse = np.unique(x[open_] * n + y[open_], return_inverse=True)
    members = np.stack([pairs // n, pairs % n], 1)
    united = union(members, Sets(members, table))
    (old, new), table = together([Sets(ids, table), united])
    old[open_] = new[inverse]
    return _pruned(Sets(old, table))


def union(members: np.ndarray, of: Sets) -> Sets:
    """For each row of `members` (numbers of sets in `of`, `[..., k]`), the union of the sets."""
    k = members.shape[-1]
    rows = members.reshape(-1, k) if k else members.reshape(math.prod(members.shape[:-1]), 0)
    begins = np.arange(len(rows) + 1) * k
    return united((begins, rows.reshape(-1)), members.shape[:-1], of)


def united(members: Rows, shape: Sequence[int], of: Sets) -> Sets:
    """Like `union`, for rows of any length. Row `i` is element `i` of an array of this shape."""
    begins, ids = members
    nonempty = np.diff(begins) > 0
    if of.sizes[ids].sum() > MOST:
        return _shared(ids, nonempty.reshape(shape), of)
    has_all = np.zeros(len(begins) - 1, bool)
    if (ids == ALL).any():
        has_all[nonempty] = np.maximum.reduceat(ids == ALL, begins[:-1][nonempty])
    in_table = ids >= FIRST
    offsets = np.concatenate([[0], np.cumsum(in_table)])[begins]
    rows = table_of((offsets, ids[in_table] - FIRST), of.table.shape[0]) @ of.table
    numbers = np.arange(FIRST, FIRST + len(has_all))
    return _canonical(np.where(has_all, ALL, numbers).reshape(shape), sparse.csr_array(rows))


def _shared(ids: np.ndarray, nonempty: np.ndarray, of: Sets) -> Sets:
    """One set, the union of the sets `ids`, for all elements that are `nonempty`."""
    used = np.unique(ids)
    if ALL in used:
        return of.at(np.where(nonempty, ALL, EMPTY))
    rows = of.table[used[used >= FIRST] - FIRST]
    members = np.unique(rows.indices)
    table = table_of((np.array([0, len(members)]), members), of.width)
    return _canonical(np.where(nonempty, FIRST, EMPTY), table)


def _canonical(ids: np.ndarray, table: sparse.csr_array) -> Sets:
    """Give empty sets the number `EMPTY`, and sets of all input elements the number `ALL`."""
    sizes = np.diff(table.indptr)
    if not table.shape[1] or (sizes == 0).any() or (sizes == table.shape[1]).any():
        numbers = np.where(sizes == 0, EMPTY, np.where(sizes == table.shape[1], ALL, -1))
        numbers = np.where(numbers < 0, np.arange(FIRST, FIRST + len(sizes)), numbers)
        ids = np.concatenate([[EMPTY, ALL], numbers])[ids]
    return _pruned(Sets(ids, table))


def _pruned(sets: Sets) -> Sets:
    """Drop the unused rows of the table, if they are more than half of it."""
    is_used = np.zeros(sets.table.shape[0] + FIRST, bool)
    is_used[sets.ids] = True
    used = np.flatnonzero(is_used[FIRST:]) + FIRST
    if 2 * len(used) >= sets.table.shape[0]:
        return sets
    numbers = np.zeros(sets.table.shape[0] + FIRST, int)
    numbers[ALL], numbers[used] = ALL, np.arange(FIRST, FIRST + len(used))
    return Sets(numbers[sets.ids], sets.table[used - FIRST])


def over(sets: Sets, axes: Sequence[int]) -> Sets:
    """The union along some axes, which are removed."""
    if not axes:
        return sets
    rest = [i for i in range(sets.ids.ndim) if i not in axes]
    shape = [sets.ids.shape[i] for i in rest]
    members = sets.ids.transpose([*rest, *axes]).reshape(*shape, math.prod(
        sets.ids.shape[i] for i in axes))  # fmt: skip
    return union(members, sets)


def along(sets: Sets, axis: int, sees: Rows) -> Sets:
    """For each row of `sees`, the union of the sets at the row's indices along an axis."""
    begins, indices = sees
    lines = np.moveaxis(sets.ids, axis, -1)
    n = len(begins) - 1
    if (np.diff(begins) <= 1).all():
        padded = np.concatenate([np.zeros((*lines.shape[:-1], 1), int), lines], -1)
        index = np.zeros(n, int)
        index[np.diff(begins) == 1] = indices + 1
        return sets.at(np.moveaxis(padded[..., index], -1, axis))
    count = math.prod(lines.shape[:-1])
    offsets = np.arange(count)[:, None] * len(indices) + begins[:-1]
    offsets = np.append(offsets.reshape(-1), count * len(indices))
    seen = united((offsets, lines[..., indices].reshape(-1)), (*lines.shape[:-1], n), sets)
    return seen.at(np.moveaxis(seen.ids, -1, axis))


def accumulated(sets: Sets, axis: int, way: int) -> Sets:
    """The cumulative union along an axis: from the first index, or from the last if `way` is -1."""
    lines = np.moveaxis(sets.ids, axis, -1)[..., ::way]
    total, step = sets.at(lines), 1
    while step < lines.shape[-1]:
        before = np.zeros_like(total.ids)
        before[..., step:] = total.ids[..., :-step]
        total, step = either([total, total.at(before)]), 2 * step
    return total.at(np.moveaxis(total.ids[..., ::way], -1, axis))


def paired(sets: Sets, rows: Rows, shape: Sequence[int]) -> Sets:
    """For each row of `rows`, the union of the sets of the row's elements; as an array of `shape`.

    The elements of the value are numbered in row-major order.
    """
    begins, elements = rows
    return united((begins, sets.ids.reshape(-1)[elements]), shape, sets) if (
        np.diff(begins) > 1).any() else _single(sets, rows, shape)  # fmt: skip


def _single(sets: Sets, rows: Rows, shape: Sequence[int]) -> Sets:
    ids = np.zeros(len(rows[0]) - 1, int)
    ids[np.diff(rows[0]) == 1] = sets.ids.reshape(-1)[rows[1]]
    return sets.at(ids.reshape(shape))


def size(sets: Sets) -> int:
    """The sum of the numbers of members of all elements' sets."""
    return int(sets.sizes[sets.ids].sum())


def rows(sets: Sets) -> sparse.csr_array:
    """The set of each element as a row of a boolean matrix: the pattern of a Jacobian."""
    ids = sets.ids.reshape(-1)
    all_inputs = table_of((np.array([0, sets.width]), np.arange(sets.width)), sets.width)
    table = sparse.csr_array(sparse.vstack([all_inputs, sets.table], format="csr"))
    nonempty = ids > EMPTY
    begins = np.concatenate([[0], np.cumsum(nonempty)])
    out = sparse.csr_array(table_of((begins, ids[nonempty] - ALL), table.shape[0]) @ table)
    out.sort_indices()
    return out
