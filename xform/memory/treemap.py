"""Treemap layout: split a rectangle into boxes with given areas, as square as possible."""

from __future__ import annotations

from collections.abc import Sequence

# The corner x and y, the width and the height.
Box = tuple[float, float, float, float]
# Divisors are at least this, so that an empty rectangle does not divide by zero.
_TINY = 1e-300


def squarify(sizes: Sequence[float], x: float, y: float, width: float, height: float) -> list[Box]:
    """Return one box `(x, y, width, height)` for each size, inside the rectangle that is given.

    Sizes must be positive, largest first. The areas of the boxes are in proportion to the sizes,
    and fill the rectangle.

    Cost: linear in the number of sizes.
    Source: Bruls, Huizing, van Wijk, "Squarified treemaps", 2000, section 3.

    >>> from xform.memory.treemap import squarify
    >>> squarify([2, 1, 1], 0.0, 0.0, 2.0, 2.0)
    [(0.0, 0.0, 1.0, 2.0), (1.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)]
    """
    boxes: list[Box] = []
    scale = width * height / max(sum(sizes), _TINY)
    first = 0
    while first < len(sizes):
        # Fill a row along the shorter side until another box would make its worst ratio worse.
        side = min(width, height)
        row_area, end = sizes[first] * scale, first + 1
        worst = _worst_ratio(sizes[first] * scale, sizes[first] * scale, row_area, side)
        while end < len(sizes):
            larger_area = row_area + sizes[end] * scale
            ratio = _worst_ratio(sizes[first] * scale, sizes[end] * scale, larger_area, side)
            if ratio > worst:
                break
            row_area, worst, end = larger_area, ratio, end + 1
        depth = row_area / max(side, _TINY)
        offset = 0.0
        for size in sizes[first:end]:
            length = size * scale / max(depth, _TINY)
            if width >= height:
                boxes.append((x, y + offset, depth, length))
            else:
                boxes.append((x + offset, y, length, depth))
            offset += length
        if width >= height:
            x, width = x + depth, width - depth
        else:
            y, height = y + depth, height - depth
        first = end
    return boxes


def _worst_ratio(largest: float, smallest: float, row_area: float, side: float) -> float:
    """Return the largest ratio of sides in a row of boxes.

    `largest` and `smallest` are the areas of boxes in the row, `row_area` is the sum of all areas,
    and `side` is the length of the row.
    """
    square = row_area * row_area
    return max(
        side * side * largest / max(square, _TINY), square / max(side * side * smallest, _TINY)
    )
