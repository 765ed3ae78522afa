"""Batches of any data through the package Grain: mixed, shuffled, shared by processes, resumable.

A source is a random-access sequence of elements, such as pictures. `mixed` shuffles and mixes
sources without end, and `batches` iterates over batches of the result. An item of that iterator
holds `slices` batches, because a training step may accumulate the gradients of several.

The elements of batch i depend only on the sources, weights, sizes, seed and i. They do not depend
on the number of processes: each process reads its own part of every batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import grain
import jax
import numpy as np

from models.errors import InputError

# Number of elements of an endless mix.
ENDLESS = 2**60


class Source(Protocol):
    """A random-access source. Each element is a pytree of arrays, and all have the same shapes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of each batch that this process reads.

    Attributes:
      process: index of this process.
      processes: number of processes.
    """

    process: int = 0
    processes: int = 1


# The share of a single process: whole batches.
ALONE = Share()


def share_of(sharding: jax.sharding.Sharding, batch: int) -> Share:
    """Return the part of each batch that this process must read for its own devices.

    Args:
      sharding: the sharding of arrays `[slices, batch, ...]`. Each process reads the whole of
        all axes after the batch, although its devices may hold only a part.
      batch: the size of their second axis.

    Raises:
      InputError: the sharding cannot divide the axis, or the parts of this process are not
        contiguous.
    """
    try:
        after = getattr(sharding, "spec", ())[2:]
        places = sharding.addressable_devices_indices_map(
            (1, batch, *(sharding.num_devices for _ in after))
        )
    except ValueError as error:
        raise InputError(
            f"batches of {batch} cannot be sharded over these devices: {error}; choose another"
            " --batch or --mesh"
        ) from None
    spans = sorted({index[1].indices(batch)[:2] for index in places.values() if index is not None})
    first, stop = spans[0][0], max(span[1] for span in spans)
    own = stop - first
    if batch % own or first % own or own > sum(b - a for a, b in spans):
        raise InputError(
            f"the devices of this process hold parts of a batch that are not contiguous: {spans};"
            " choose another --mesh"
        )
    return Share(first // own, batch // own)


def mixed(sources: Sequence[Source], weights: Sequence[float], seed: int) -> grain.MapDataset[Any]:
    """Return a mix of the sources without end, in proportion to the weights.

    Each source has its own shuffled order. It is reshuffled whenever all its elements are used up,
    independently of the other sources.
    """
    parts = []
    for number, source in enumerate(sources):
        own = (
            seed
            if number == 0
            else int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        )
        shuffled = grain.MapDataset.source(source).seed(own).shuffle()
        # Not `repeat()`: its length is Python's largest, and batches of one would overflow it.
        parts.append(shuffled.repeat(ENDLESS // len(source)))
    return parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, weights)


class _ProcessPart:
    """The elements of all batches that one process reads, in order."""

    def __init__(self, whole: Source, batch: int, share: Share) -> None:
        # This process reads `_own` elements of each batch, from the one at `_first`.
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
    """Iterate over batches of consecutive elements. A thread prefetches them.

    The iterator is resumable with `get_state` and `set_state`, also with another number of
    processes: the state is the number of batches taken.

    Args:
      whole: all elements in order, such as the result of `mixed`.
      batch: elements per batch, over all processes; a multiple of the number of processes.
      slices: number of batches in one item of the iterator.
      share: the part that this process reads.
      sharding: the sharding of the batches; without it they stay NumPy arrays.
      ahead: number of items to prefetch.

    Returns:
      An iterator over pytrees of arrays `[slices, batch, ...]`. With a `sharding` they are global
      arrays of whole batches. Without it they are `[slices, batch / processes, ...]`, this
      process's part.

    Raises:
      InputError: `batch` is not a multiple of the number of processes.
    """
    if batch % share.processes:
        raise InputError(
            f"batches of {batch} cannot be divided equally among {share.processes} processes:"
            " choose another --batch"
        )
    own = batch // share.processes
    read = grain.MapDataset.source(_ProcessPart(whole, batch, share)).batch(own).batch(slices)
    # One thread is enough: slicing arrays in memory is little work.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)
    items = read.to_iter_dataset(options)
    if sharding is not None:
        items = items.map(lambda tree: _global_arrays(tree, sharding, batch))
        items = grain.experimental.ThreadPrefetchIterDataset(items, prefetch_buffer_size=ahead)
    return iter(items)


def _global_arrays(tree: Any, sharding: jax.sharding.Sharding, batch: int) -> Any:
    """Make global arrays `[slices, batch, ...]` from the part that this process read."""

    def place(x: np.ndarray) -> jax.Array:
        shape = (x.shape[0], batch, *x.shape[2:])
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return jax.tree.map(place, tree)


def spread(source: Source, *, batch: int, count: int) -> list[Any]:
    """Take up to `count` elements, evenly spaced over a source, in batches `[<= batch, ...]`.

    All batches have the same size. Elements that do not fill a batch are left out.
    """
    count = min(count, len(source))
    size = min(batch, count)
    picked = np.linspace(0, len(source) - 1, count).astype(int)
    elements = [source[int(i)] for i in picked]
    groups = [elements[i : i + size] for i in range(0, count - size + 1, size)]
    return [jax.tree.map(lambda *leaves: np.stack(leaves), *group) for group in groups]
