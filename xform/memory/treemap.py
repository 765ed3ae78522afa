"""Treemap layout: split a rectangle into boxes with given areas, as close to squares as it can."""

from __future__ import annotations

from collections.abc import Sequence

Box = tuple[float, float, float, float]


def squarify(sizes: Sequence[float], x: float, y: float, width: float, height: float) -> list[Box]:
    """One box `(x, y, width, height)` for each size; sizes must be positive, largest first.

    Cost: linear in the number of sizes.
    Source: Bruls, Huizing, van Wijk, "Squarified treemaps", 2000, section 3.

    >>> from xform.memory.treemap import squarify
    >>> squarify([2, 1, 1], 0.0, 0.0, 2.0, 2.0)
    [(0.0, 0.0, 1.0, 2.0), (1.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)]
    """
    boxes: list[Box] = []
    scale = width * height / max(sum(sizes), 1e-300)
    first = 0
    while first < len(sizes):
        # Fill a row along the shorter side until another box would make its worst ratio worse.
        side = min(width, height)
        row, last = sizes[first] * scale, first + 1
        worst = _worst(sizes[first] * scale, sizes[first] * scale, row, side)
        while last < len(sizes):
            more = row + sizes[last] * scale
            longer = _worst(sizes[first] * scale, sizes[last] * scale, more, side)
            if longer > worst:
                break
            row, worst, last = more, longer, last + 1
        depth = row / max(side, 1e-300)
        at = 0.0
        for size in sizes[first:last]:
            length = size * scale / max(depth, 1e-300)
            if width >= height:
                boxes.append((x, y + at, depth, length))
            else:
                boxes.append((x + at, y, length, depth))
            at += length
        if width >= height:
            x, width = x + depth, width - depth
        else:
            y, height = y + depth, height - depth
        first = last
    return boxes


def _worst(most: float, least: float, row: float, side: float) -> float:
    """The largest ratio of sides in a row of boxes, from its extreme areas and its total area."""
    return max(
        side * side * most / max(row * row, 1e-300), row * row / max(side * side * least, 1e-300)
    )
