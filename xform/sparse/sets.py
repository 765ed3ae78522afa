"""Sets of input elements, one for each element of a value.

Each set has a number, and a value's pattern is an array of numbers of its shape: to move data is to
move numbers. 0 is the empty set and 1 that of all inputs, whatever there are; the others are rows
of a table. A set may be larger than need be, never smaller.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import sparse

from xform.reach import Rows

EMPTY, ALL, FIRST = 0, 1, 2
# So many members of sets are listed at once: beyond it all elements of a value share one set.
MOST = 2**25


@dataclasses.dataclass(frozen=True, eq=False)
class Sets:
    """The sets of a value.

    Attributes:
      ids: their numbers, in the shape of the value.
      table: the sets from number 2 on, as rows; as many columns as there are inputs.
    """

    ids: np.ndarray
    table: sparse.csr_array

    @property
    def width(self) -> int:
        """How many inputs there are."""
        return self.table.shape[1]

    def at(self, ids: np.ndarray) -> Sets:
        """The same sets elsewhere."""
        return Sets(ids, self.table)

    @property
    def sizes(self) -> np.ndarray:
        """How many inputs the set of each number has."""
        return np.concatenate([[0, self.width], np.diff(self.table.indptr)])


def table_of(rows: Rows, width: int) -> sparse.csr_array:
    """A table of rows of places."""
    begins, places = rows
    data = np.ones(len(places), bool)
    return sparse.csr_array((data, places, begins), shape=(len(begins) - 1, width))


def inputs(shape: Sequence[int], start: int, width: int) -> Sets:
    """An input, its elements the inputs from `start` on."""
    n = math.prod(shape)
    table = table_of((np.arange(n + 1), np.arange(start, start + n)), width)
    return _canonical(np.arange(FIRST, FIRST + n).reshape(shape), table)


def together(parts: Sequence[Sets]) -> tuple[list[np.ndarray], sparse.csr_array]:
    """The numbers of several values' sets in one table."""
    tables = list({id(p.table): p.table for p in parts}.values())
    starts = dict(zip(map(id, tables), np.cumsum([0, *(t.shape[0] for t in tables)]), strict=False))
    ids = [np.where(p.ids < FIRST, p.ids, p.ids + starts[id(p.table)]) for p in parts]
    table = tables[0] if len(tables) == 1 else sparse.vstack(tables, format="csr")
    return ids, sparse.csr_array(table)


def either(parts: Sequence[Sets]) -> Sets:
    """Element by element the union of several values' sets; those without axes go to all."""
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
    """For each row of numbers of sets, their union."""
    k = members.shape[-1]
    rows = members.reshape(-1, k) if k else members.reshape(math.prod(members.shape[:-1]), 0)
    begins = np.arange(len(rows) + 1) * k
    return united((begins, rows.reshape(-1)), members.shape[:-1], of)


def united(members: Rows, shape: Sequence[int], of: Sets) -> Sets:
    """The same for rows of any length, which are the elements of an array of some shape."""
    begins, ids = members
    some = np.diff(begins) > 0
    if of.sizes[ids].sum() > MOST:
        return _one(ids, np.where(some, 0, -1).reshape(shape), of)
    whole = np.zeros(len(begins) - 1, bool)
    if (ids == ALL).any():
        whole[some] = np.maximum.reduceat(ids == ALL, begins[:-1][some])
    real = ids >= FIRST
    kept = np.concatenate([[0], np.cumsum(real)])[begins]
    rows = table_of((kept, ids[real] - FIRST), of.table.shape[0]) @ of.table
    numbers = np.arange(FIRST, FIRST + len(whole))
    return _canonical(np.where(whole, ALL, numbers).reshape(shape), sparse.csr_array(rows))


def _one(ids: np.ndarray, where: np.ndarray, of: Sets) -> Sets:
    """One set for all elements but those with -1: the union of all that they would have."""
    used = np.unique(ids)
    if ALL in used:
        return of.at(np.where(where < 0, EMPTY, ALL))
    rows = of.table[used[used >= FIRST] - FIRST]
    there = np.unique(rows.indices)
    table = table_of((np.array([0, len(there)]), there), of.width)
    return _canonical(np.where(where < 0, EMPTY, FIRST), table)


def _canonical(ids: np.ndarray, table: sparse.csr_array) -> Sets:
    """Empty sets and those of all inputs by their own numbers."""
    sizes = np.diff(table.indptr)
    if not table.shape[1] or (sizes == 0).any() or (sizes == table.shape[1]).any():
        numbers = np.where(sizes == 0, EMPTY, np.where(sizes == table.shape[1], ALL, -1))
        numbers = np.where(numbers < 0, np.arange(FIRST, FIRST + len(sizes)), numbers)
        ids = np.concatenate([[EMPTY, ALL], numbers])[ids]
    return _pruned(Sets(ids, table))


def _pruned(sets: Sets) -> Sets:
    """Without the rows that nothing uses, if those are most."""
    there = np.zeros(sets.table.shape[0] + FIRST, bool)
    there[sets.ids] = True
    used = np.flatnonzero(there[FIRST:]) + FIRST
    if 2 * len(used) >= sets.table.shape[0]:
        return sets
    numbers = np.zeros(sets.table.shape[0] + FIRST, int)
    numbers[ALL], numbers[used] = ALL, np.arange(FIRST, FIRST + len(used))
    return Sets(numbers[sets.ids], sets.table[used - FIRST])


def over(sets: Sets, axes: Sequence[int]) -> Sets:
    """The union along some axes, which go."""
    if not axes:
        return sets
    rest = [i for i in range(sets.ids.ndim) if i not in axes]
    shape = [sets.ids.shape[i] for i in rest]
    members = sets.ids.transpose([*rest, *axes]).reshape(*shape, math.prod(
        sets.ids.shape[i] for i in axes))  # fmt: skip
    return union(members, sets)


def along(sets: Sets, axis: int, sees: Rows) -> Sets:
    """For each place on an axis the union of the places on it that it sees."""
    begins, places = sees
    lines = np.moveaxis(sets.ids, axis, -1)
    n = len(begins) - 1
    if (np.diff(begins) <= 1).all():
        at = np.concatenate([np.zeros((*lines.shape[:-1], 1), int), lines], -1)
        one = np.zeros(n, int)
        one[np.diff(begins) == 1] = places + 1
        return sets.at(np.moveaxis(at[..., one], -1, axis))
    count = math.prod(lines.shape[:-1])
    whole = np.arange(count)[:, None] * len(places) + begins[:-1]
    whole = np.append(whole.reshape(-1), count * len(places))
    seen = united((whole, lines[..., places].reshape(-1)), (*lines.shape[:-1], n), sets)
    return seen.at(np.moveaxis(seen.ids, -1, axis))


def accumulated(sets: Sets, axis: int, way: int) -> Sets:
    """For each place on an axis the union of all up to it; from the last on if `way` is -1."""
    lines = np.moveaxis(sets.ids, axis, -1)[..., ::way]
    total, step = sets.at(lines), 1
    while step < lines.shape[-1]:
        before = np.zeros_like(total.ids)
        before[..., step:] = total.ids[..., :-step]
        total, step = either([total, total.at(before)]), 2 * step
    return total.at(np.moveaxis(total.ids[..., ::way], -1, axis))


def paired(sets: Sets, rows: Rows, shape: Sequence[int]) -> Sets:
    """By pairs of elements: those of an array of some shape, and those of the value."""
    begins, places = rows
    return united((begins, sets.ids.reshape(-1)[places]), shape, sets) if (
        np.diff(begins) > 1).any() else _single(sets, rows, shape)  # fmt: skip


def _single(sets: Sets, rows: Rows, shape: Sequence[int]) -> Sets:
    ids = np.zeros(len(rows[0]) - 1, int)
    ids[np.diff(rows[0]) == 1] = sets.ids.reshape(-1)[rows[1]]
    return sets.at(ids.reshape(shape))


def size(sets: Sets) -> int:
    """How many members all elements' sets have together."""
    return int(sets.sizes[sets.ids].sum())


def rows(sets: Sets) -> sparse.csr_array:
    """A row for each element, in order: the pattern of a Jacobian."""
    ids = sets.ids.reshape(-1)
    every = table_of((np.array([0, sets.width]), np.arange(sets.width)), sets.width)
    table = sparse.csr_array(sparse.vstack([every, sets.table], format="csr"))
    there = ids > EMPTY
    begins = np.concatenate([[0], np.cumsum(there)])
    out = sparse.csr_array(table_of((begins, ids[there] - ALL), table.shape[0]) @ table)
    out.sort_indices()
    return out
