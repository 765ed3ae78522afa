"""Batches of any source through Grain: mixed, shuffled, shared among processes, resumable.

Which elements batch i holds depends on sources, weights, sizes, seed and i alone. How many
processes there are does not change it: each reads its own part of every batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import grain
import jax
import numpy as np

from models.errors import InputError

FOR_EVER = 2**60


class Source(Protocol):
    """Elements by number; each is a tree of arrays, and all have the same shapes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Share:
    """Which part of each batch this process reads.

    Attributes:
      process: the number of this process.
      processes: how many there are.
    """

    process: int = 0
    processes: int = 1


ALONE = Share()


def share_of(sharding: jax.sharding.Sharding, batch: int) -> Share:
    """What this process must read so that its devices have their parts of a batch.

    Args:
      sharding: of arrays `[slices, batch, ...]`.
      batch: their second axis.

    Raises:
      InputError: the axis cannot be divided so, or this process has parts far apart.
    """
    try:
        places = sharding.addressable_devices_indices_map((1, batch))
    except ValueError as error:
        raise InputError(f"batches of {batch} cannot lie so on devices: {error}") from None
    spans = sorted({index[1].indices(batch)[:2] for index in places.values() if index is not None})
    first, stop = spans[0][0], max(span[1] for span in spans)
    own = stop - first
    if batch % own or first % own or own > sum(b - a for a, b in spans):
        raise InputError(f"this process has parts of a batch that lie apart: {spans}")
    return Share(first // own, batch // own)


def mixed(sources: Sequence[Source], weights: Sequence[float], seed: int) -> grain.MapDataset[Any]:
    """The elements of sources for ever, each in its own shuffled order, in these proportions.

    Each source is shuffled anew when all its elements were taken, however often the others were.
    """
    parts = []
    for number, source in enumerate(sources):
        own = (
            seed
            if number == 0
            else int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        )
        shuffled = grain.MapDataset.source(source).seed(own).shuffle()
        # Not `repeat()`: that is for as many as Python's largest length, and batches of one are one
        # more than that.
        parts.append(shuffled.repeat(FOR_EVER // len(source)))
    return parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, weights)


class _Part:
    """The elements of a sequence of batches that one process reads, one after another."""

    def __init__(self, whole: Source, batch: int, share: Share) -> None:
        self._whole, self._batch, self._own = whole, batch, batch // share.processes
        self._first = share.process * self._own

    def __len__(self) -> int:
        return len(self._whole) // self._batch * self._own

    def __getitem__(self, index: int) -> Any:
        batch, place = divmod(index, self._own)
        return self._whole[batch * self._batch + self._first + place]


def batches(
    whole: Source,
    *,
    batch: int,
    slices: int = 1,
    share: Share = ALONE,
    sharding: jax.sharding.Sharding | None = None,
    ahead: int = 2,
) -> grain.DatasetIterator[Any]:
    """Iterate over batches of consecutive elements, read ahead by a thread.

    `get_state` and `set_state` of the iterator make it resumable, from any process count to any
    other: the state says how many batches were taken.

    Args:
      whole: all elements in their order, such as `mixed` gives.
      batch: elements held at once, by all processes together; a multiple of their number.
      slices: how many such batches make an element of the iterator.
      share: what this process reads.
      sharding: where the batches go; without it they stay NumPy arrays.
      ahead: batches that are ready before they are asked for.

    Returns:
      An iterator over the trees of the elements, with arrays `[slices, batch, ...]`: of the whole
        batch with a `sharding`, of this process's part without.
    """
    if batch % share.processes:
        raise InputError(
            f"batches of {batch} cannot be shared equally by {share.processes} processes: choose"
            " another --batch"
        )
    own = batch // share.processes
    read = grain.MapDataset.source(_Part(whole, batch, share)).batch(own).batch(slices)
    # One thread reads ahead: slicing what is in memory is too little work to share.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)
    there = read.to_iter_dataset(options)
    if sharding is not None:
        there = there.map(lambda tree: _placed(tree, sharding, batch))
        there = grain.experimental.ThreadPrefetchIterDataset(there, prefetch_buffer_size=ahead)
    return iter(there)


def _placed(tree: Any, sharding: jax.sharding.Sharding, batch: int) -> Any:
    """Arrays `[slices, batch, ...]` on devices, of which this process gives its part."""

    def place(x: np.ndarray) -> jax.Array:
        shape = (x.shape[0], batch, *x.shape[2:])
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return jax.tree.map(place, tree)


def spread(source: Source, *, batch: int, count: int) -> list[Any]:
    """Up to `count` elements spread evenly over a source, as equal batches `[<= batch, ...]`.

    What does not fill a batch is left out, so that all have one shape.
    """
    count = min(count, len(source))
    size = min(batch, count)
    picked = np.linspace(0, len(source) - 1, count).astype(int)
    elements = [source[int(i)] for i in picked]
    some = [elements[i : i + size] for i in range(0, count - size + 1, size)]
    return [jax.tree.map(lambda *leaves: np.stack(leaves), *few) for few in some]
