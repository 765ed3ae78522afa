"""Gather and scatter in NumPy, window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax import lax

Params = dict[str, Any]
_MODES = lax.GatherScatterMode


def _windows(shape: Any, indices: Any, sizes: Any, to: Any, batching: Any, at: Any, clip: bool
             ) -> Iterator[tuple[Any, tuple[slice, ...] | None]]:  # fmt: skip
    """Return for each window the place of its index vector, and its start or None outside."""
    room = [n - m for n, m in zip(shape, sizes, strict=True)]
    for b in np.ndindex(indices.shape[:-1]):
        start = [0] * len(shape)
        for k, d in enumerate(to):
            start[d] = int(indices[b][k])
        for d, i in zip(batching, at, strict=True):
            start[d] = b[i]
        if clip:
            start = [min(max(s, 0), r) for s, r in zip(start, room, strict=True)]
        inside = all(0 <= s <= r for s, r in zip(start, room, strict=True))
        yield (
            b,
            tuple(slice(s, s + m) for s, m in zip(start, sizes, strict=True)) if inside else None,
        )


def gather(p: Params, x: Any, indices: Any) -> Any:
    """`lax.gather`."""
    numbers, sizes, mode = p["dimension_numbers"], p["slice_sizes"], p["mode"]
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = [n for d, n in enumerate(sizes) if d not in dropped]
    batch = indices.shape[:-1]
    fill = p["fill_value"]
    if fill is None:
        fill = {"f": np.nan, "c": np.nan, "b": True}.get(x.dtype.kind)
        if fill is None:
            info = np.iinfo(x.dtype)
            fill = info.min if x.dtype.kind == "i" else info.max
    out = np.full((*batch, *window), fill, x.dtype)
    clip = mode != _MODES.FILL_OR_DROP
    at = numbers.start_indices_batching_dims
    to, batching = numbers.start_index_map, numbers.operand_batching_dims
    for b, place in _windows(x.shape, indices, sizes, to, batching, at, clip):
        if place is not None:
            out[b] = x[place].reshape(window)
    return np.moveaxis(out, range(len(batch), out.ndim), numbers.offset_dims)


def scatter(f: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return `lax.scatter` or a relative, where `f(old, update)` is one step."""

    def run(p: Params, x: Any, indices: Any, updates: Any) -> Any:
        numbers = p["dimension_numbers"]
        inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        dims = numbers.update_window_dims
        updates = np.moveaxis(updates, dims, range(updates.ndim - len(dims), updates.ndim))
        window = iter(updates.shape[updates.ndim - len(dims) :])
        sizes = [1 if d in inserted else next(window) for d in range(x.ndim)]
        out = np.array(x)
        at = numbers.scatter_indices_batching_dims
        clip = p["mode"] == _MODES.CLIP
        to, batching = numbers.scatter_dims_to_operand_dims, numbers.operand_batching_dims
        for b, place in _windows(x.shape, indices, sizes, to, batching, at, clip):
            if place is not None:
                out[place] = f(out[place], updates[b].reshape(sizes))
        return out

    return run
