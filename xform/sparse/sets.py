"""Sets of input elements: for each element of a value, the input elements that it may depend on.

An *input element* is one element of the differentiated arguments, so it is a column of the
Jacobian. Each set has a number. A value has an array of these numbers in its own shape, so an
operation that moves data, such as a transpose, moves the numbers in the same way. Number 0 is the
empty set, and number 1 is the set of all input elements. The other numbers stand for rows of a
table. A set may contain too many elements, but never too few.

`Rows` is a boolean sparse matrix in compressed rows: the offset of the beginning of each row, and
the column indices of all rows. In most functions here, row `i` lists the elements (or the sets)
that element `i` of a result depends on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import sparse

from xform.registry.dependence import Rows

# The numbers of the empty set, of the set of all input elements, and of the table's first row.
EMPTY, ALL, FIRST = 0, 1, 2
# A union with more members than this is not computed: all elements of the value share one set.
_LARGEST_UNION = 2**25


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

    def with_ids(self, ids: np.ndarray) -> Sets:
        """Return sets with the same table and other `ids`."""
        return Sets(ids, self.table)

    @property
    def sizes(self) -> np.ndarray:
        """The number of members of each set, by number of the set."""
        return np.concatenate([[0, self.width], np.diff(self.table.indptr)])


def _boolean_array(rows: Rows, width: int) -> sparse.csr_array:
    """Convert `rows` to a SciPy sparse array with `width` columns."""
    begins, columns = rows
    data = np.ones(len(columns), bool)
    return sparse.csr_array((data, columns, begins), shape=(len(begins) - 1, width))


def input_sets(shape: Sequence[int], start: int, width: int) -> Sets:
    """Return the sets of an input: element `i` depends only on input element `start + i`.

    `width` is the number of elements of all inputs together.
    """
    n = math.prod(shape)
    table = _boolean_array((np.arange(n + 1), np.arange(start, start + n)), width)
    return _normalize(np.arange(FIRST, FIRST + n).reshape(shape), table)


def merge_tables(parts: Sequence[Sets]) -> tuple[list[np.ndarray], sparse.csr_array]:
    """Merge the tables of several values; return the new numbers of each value, and the table."""
    tables = list({id(p.table): p.table for p in parts}.values())
    starts = dict(zip(map(id, tables), np.cumsum([0, *(t.shape[0] for t in tables)]), strict=False))
    ids = [np.where(p.ids < FIRST, p.ids, p.ids + starts[id(p.table)]) for p in parts]
    table = tables[0] if len(tables) == 1 else sparse.vstack(tables, format="csr")
    return ids, sparse.csr_array(table)


def elementwise_union(parts: Sequence[Sets]) -> Sets:
    """Return the union of several values' sets, element by element. Shapes are broadcast."""
    shape = np.broadcast_shapes(*(p.ids.shape for p in parts))
    total = parts[0].with_ids(np.broadcast_to(parts[0].ids, shape))
    for part in parts[1:]:
        total = _union_of_two(total, part.with_ids(np.broadcast_to(part.ids, shape)))
    return total


def _union_of_two(a: Sets, b: Sets) -> Sets:
    """Return the elementwise union of two values of the same shape.

    A pair of sets that occurs at several elements is united only once.
    """
    (x, y), table = merge_tables([a, b])
    ids = np.where(x == EMPTY, y, np.where((y == EMPTY) | (x == y), x, -1))
    ids[(x == ALL) | (y == ALL)] = ALL
    if not (undecided := ids < 0).any():
        return Sets(ids, table)
    n = table.shape[0] + FIRST
    pairs, inverse = np.unique(x[undecided] * n + y[undecided], return_inverse=True)
    members = np.stack([pairs // n, pairs % n], 1)
    unions = _union_over_last_axis(members, Sets(members, table))
    (ids, union_ids), table = merge_tables([Sets(ids, table), unions])
    ids[undecided] = union_ids[inverse]
    return _drop_unused_rows(Sets(ids, table))


def _union_over_last_axis(members: np.ndarray, sets: Sets) -> Sets:
    """Return the union of the sets in each row of `members`.

    `members`, of shape `[..., k]`, holds numbers of sets in `sets`.
    """
    k = members.shape[-1]
    rows = members.reshape(-1, k) if k else members.reshape(math.prod(members.shape[:-1]), 0)
    begins = np.arange(len(rows) + 1) * k
    return _union_of_rows((begins, rows.reshape(-1)), members.shape[:-1], sets)


def _union_of_rows(members: Rows, shape: Sequence[int], sets: Sets) -> Sets:
    """Return the union of the sets in each row of `members`, as a value of shape `shape`.

    `members` holds numbers of sets in `sets`.
    """
    begins, ids = members
    nonempty = np.diff(begins) > 0
    if sets.sizes[ids].sum() > _LARGEST_UNION:
        return _one_set_for_all(ids, nonempty.reshape(shape), sets)
    has_all = np.zeros(len(begins) - 1, bool)
    if (ids == ALL).any():
        has_all[nonempty] = np.maximum.reduceat(ids == ALL, begins[:-1][nonempty])
    in_table = ids >= FIRST
    offsets = np.concatenate([[0], np.cumsum(in_table)])[begins]
    rows = _boolean_array((offsets, ids[in_table] - FIRST), sets.table.shape[0]) @ sets.table
    numbers = np.arange(FIRST, FIRST + len(has_all))
    return _normalize(np.where(has_all, ALL, numbers).reshape(shape), sparse.csr_array(rows))


def _one_set_for_all(ids: np.ndarray, nonempty: np.ndarray, sets: Sets) -> Sets:
    """Return a value whose `nonempty` elements all have the union of the sets `ids`."""
    used = np.unique(ids)
    if ALL in used:
        return sets.with_ids(np.where(nonempty, ALL, EMPTY))
    rows = sets.table[used[used >= FIRST] - FIRST]
    members = np.unique(rows.indices)
    table = _boolean_array((np.array([0, len(members)]), members), sets.width)
    return _normalize(np.where(nonempty, FIRST, EMPTY), table)


def _normalize(ids: np.ndarray, table: sparse.csr_array) -> Sets:
    """Give empty sets the number `EMPTY`, and sets of all input elements the number `ALL`."""
    sizes = np.diff(table.indptr)
    if not table.shape[1] or (sizes == 0).any() or (sizes == table.shape[1]).any():
        numbers = np.where(sizes == 0, EMPTY, np.where(sizes == table.shape[1], ALL, -1))
        numbers = np.where(numbers < 0, np.arange(FIRST, FIRST + len(sizes)), numbers)
        ids = np.concatenate([[EMPTY, ALL], numbers])[ids]
    return _drop_unused_rows(Sets(ids, table))


def _drop_unused_rows(sets: Sets) -> Sets:
    """Drop the unused rows of the table, if they are more than half of it."""
    is_used = np.zeros(sets.table.shape[0] + FIRST, bool)
    is_used[sets.ids] = True
    used = np.flatnonzero(is_used[FIRST:]) + FIRST
    if 2 * len(used) >= sets.table.shape[0]:
        return sets
    numbers = np.zeros(sets.table.shape[0] + FIRST, int)
    numbers[ALL], numbers[used] = ALL, np.arange(FIRST, FIRST + len(used))
    return Sets(numbers[sets.ids], sets.table[used - FIRST])


def union_over_axes(sets: Sets, axes: Sequence[int]) -> Sets:
    """Return the unions of the sets along some axes. As in a reduction, these axes are removed."""
    if not axes:
        return sets
    rest = [i for i in range(sets.ids.ndim) if i not in axes]
    shape = [sets.ids.shape[i] for i in rest]
    members = sets.ids.transpose([*rest, *axes]).reshape(*shape, math.prod(
        sets.ids.shape[i] for i in axes))  # fmt: skip
    return _union_over_last_axis(members, sets)


def gather_along_axis(sets: Sets, axis: int, index_rows: Rows) -> Sets:
    """Replace an axis by a new one, with an index for each row of `index_rows`.

    At index `i` of the new axis is the union of some sets of the old axis: of the sets at the
    indices that row `i` lists.
    """
    begins, indices = index_rows
    lines = np.moveaxis(sets.ids, axis, -1)
    n = len(begins) - 1
    if (np.diff(begins) <= 1).all():
        padded = np.concatenate([np.zeros((*lines.shape[:-1], 1), int), lines], -1)
        index = np.zeros(n, int)
        index[np.diff(begins) == 1] = indices + 1
        return sets.with_ids(np.moveaxis(padded[..., index], -1, axis))
    count = math.prod(lines.shape[:-1])
    offsets = np.arange(count)[:, None] * len(indices) + begins[:-1]
    offsets = np.append(offsets.reshape(-1), count * len(indices))
    members = offsets, lines[..., indices].reshape(-1)
    gathered = _union_of_rows(members, (*lines.shape[:-1], n), sets)
    return gathered.with_ids(np.moveaxis(gathered.ids, -1, axis))


def cumulative_union(sets: Sets, axis: int, direction: int) -> Sets:
    """Return the cumulative unions along an axis, from its first index (1) or its last (-1)."""
    lines = np.moveaxis(sets.ids, axis, -1)[..., ::direction]
    total, distance = sets.with_ids(lines), 1
    while distance < lines.shape[-1]:
        shifted = np.zeros_like(total.ids)
        shifted[..., distance:] = total.ids[..., :-distance]
        total = elementwise_union([total, total.with_ids(shifted)])
        distance *= 2
    return total.with_ids(np.moveaxis(total.ids[..., ::direction], -1, axis))


def gather_elements(sets: Sets, element_rows: Rows, shape: Sequence[int]) -> Sets:
    """Return a value of shape `shape` whose sets are unions of sets of another value.

    Element `i` has the union of the sets of the elements that row `i` of `element_rows` lists. The
    elements of both values are numbered in row-major order.
    """
    begins, elements = element_rows
    counts, ids = np.diff(begins), sets.ids.reshape(-1)[elements]
    if (counts > 1).any():
        return _union_of_rows((begins, ids), shape, sets)
    gathered = np.zeros(len(counts), int)
    gathered[counts == 1] = ids
    return sets.with_ids(gathered.reshape(shape))


def total_size(sets: Sets) -> int:
    """Return how many members the sets of all elements have in sum."""
    return int(sets.sizes[sets.ids].sum())


def to_matrix(sets: Sets) -> sparse.csr_array:
    """Return the set of each element as a row of a boolean matrix: the pattern of a Jacobian."""
    ids = sets.ids.reshape(-1)
    all_inputs = _boolean_array((np.array([0, sets.width]), np.arange(sets.width)), sets.width)
    table = sparse.csr_array(sparse.vstack([all_inputs, sets.table], format="csr"))
    nonempty = ids > EMPTY
    begins = np.concatenate([[0], np.cumsum(nonempty)])
    out = sparse.csr_array(_boolean_array((begins, ids[nonempty] - ALL), table.shape[0]) @ table)
    out.sort_indices()
    return out
