"""Plot a memory report: the live bytes over the program, and the buffers at the peak."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from xform.memory.categories import CATEGORIES, REST, category
from xform.planner.report.picture import new_figure, save_figure, style_axes
from xform.terminal.text import BYTES, human_bytes, unit_of

_REQUEST = "MemoryReport.plot"  # for error messages
_WIDTH, _HEIGHT = 10.0, 9.0  # inches
_MOST_STEPS = 1200  # more steps than this would fall on the same points of the picture
# A `$` in a text of the user is not math.
_PLAIN_TEXT: dict[str, Any] = {"parse_math": False}
_DARK, _GRAY = "#1a202c", "#718096"


def draw(data: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Plot the live bytes at each step, and below them a treemap of the buffers at the peak.

    Args:
      data: `MemoryReport.to_dict()`.
      path: the file; its suffix selects PNG, SVG or PDF. It is written completely or not at all.

    Raises:
      MissingExtra: matplotlib is not installed.
      WrongArgument: the file's suffix is not a known format.

    Cost: linear in buffers and in steps x categories; about a second for 10,000 buffers.
    """
    figure = new_figure(_REQUEST, _WIDTH, _HEIGHT)
    above, below = figure.subplots(2, 1, height_ratios=(4, 5))
    _timeline(above, data)
    _treemap(below, data)
    handles, names = above.get_legend_handles_labels()
    if names:
        figure.legend(handles, names, loc="outside lower left", ncols=6, frameon=False, fontsize=9)
    save_figure(figure, _REQUEST, path)


def bytes_by_category(data: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the live bytes of each category at each step; they add up to `data["live"]`.

    `data` is `MemoryReport.to_dict()`. Bytes that belong to no buffer are in the category `REST`.
    """
    live = np.asarray(data["live"], float)
    change: dict[str, Any] = collections.defaultdict(lambda: np.zeros(len(live) + 1))
    for b in data["buffers"]:
        if not b["counted"]:
            continue
        name = category(b["category"]).name
        first, end = (min(max(i, 0), len(live)) for i in (b["born"], b["dies"] + 1))
        change[name][first] += b["bytes"]
        change[name][end] -= b["bytes"]
    known = {name: np.cumsum(c)[:-1] for name, c in change.items()}
    total = sum(known.values(), np.zeros(len(live)))
    ordered = {c.name: known[c.name] for c in (*CATEGORIES, REST) if c.name in known}
    if np.any(rest := np.maximum(live - total, 0)):
        ordered[REST.name] = ordered.get(REST.name, 0) + rest
    return ordered


def _timeline(ax: Any, data: dict[str, Any]) -> None:
    """Draw the live bytes at each step as stacked areas, with the peak and the capacity."""
    style_axes(ax)
    live, capacity = data["live"], data["device"]["capacity_bytes"]
    ax.set_title(_title(data), loc="left", color=_DARK, **_PLAIN_TEXT)
    ax.set_xlabel("step of the compiled program, in program order")
    peak = max(live, default=0)
    unit, unit_bytes = unit_of(peak, 1024, BYTES)
    ax.set_ylabel(f"live {unit}")
    if not live:
        ax.text(0.5, 0.5, "The compiler reported no steps.", ha="center", color=_GRAY)
        return
    steps = _drawn_steps(live)
    edges, steps = np.append(steps, len(live)), np.append(steps, steps[-1])
    bottom = np.zeros(len(steps))
    for name, values in bytes_by_category(data).items():
        top = bottom + values[steps] / unit_bytes
        color = category(name).light
        ax.fill_between(edges, bottom, top, step="post", linewidth=0, color=color, label=name)
        bottom = top
    i = data["peak_step"]
    ax.plot([i + 0.5], [peak / unit_bytes], "v", color=_DARK, markersize=6)
    ax.annotate(
        f"peak {human_bytes(peak)}",
        (i + 0.5, peak / unit_bytes),
        xytext=(8, 6),
        textcoords="offset points",
        color=_DARK,
    )
    highest = peak
    if capacity:
        label = f"capacity of {data['device']['name']}: {human_bytes(capacity)}"
        if capacity > 3 * peak:
            label += ", far above"
        else:
            highest = max(peak, capacity)
            ax.axhline(capacity / unit_bytes, color=_DARK, linestyle="--", linewidth=1)
        ax.set_title(label, loc="right", fontsize=9, color=_GRAY, **_PLAIN_TEXT)
    ax.set_xlim(0, len(live))
    ax.set_ylim(0, 1.12 * highest / unit_bytes or 1)


def _drawn_steps(live: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the steps to draw: all; for a long program, the highest of each group of steps."""
    if len(live) <= _MOST_STEPS:
        return np.arange(len(live))
    parts = np.array_split(np.asarray(live), _MOST_STEPS)
    starts = np.cumsum([0, *map(len, parts[:-1])])
    return starts + [int(np.argmax(p)) for p in parts]


def _treemap(ax: Any, data: dict[str, Any]) -> None:
    """Draw the buffers at the peak as boxes: a box for each source line in each category."""
    ax.set_axis_off()
    ax.set_title(
        "Buffers at the peak: colours are categories, boxes are source lines, areas are bytes",
        loc="left",
        fontsize=10,
        color=_DARK,
    )
    ax.set_xlim(0, _WIDTH)
    ax.set_ylim(_HEIGHT / 2, 0)
    groups: dict[str, dict[str, int]] = collections.defaultdict(collections.Counter)
    for b in data["buffers"]:
        if b["at_peak"] and b["bytes"]:
            groups[category(b["category"]).name][b["where"] or "no source line"] += b["bytes"]
    sizes = {name: sum(lines.values()) for name, lines in groups.items()}
    for name, box in _boxes(sizes, (0, 0, _WIDTH, _HEIGHT / 2)):
        for where, inner in _boxes(groups[name], box):
            _draw_box(ax, inner, category(name).light, where, human_bytes(groups[name][where]))


def _boxes(sizes: dict[str, int], box: Box) -> list[tuple[str, Box]]:
    """Return a box inside `box` for each name, with an area in proportion to its size."""
    names = sorted(sizes, key=lambda n: (-sizes[n], n))
    return list(zip(names, squarify([sizes[n] for n in names], *box), strict=True))


def _draw_box(ax: Any, box: Box, color: str, where: str, size: str) -> None:
    """Draw a box, with its source line and size as text if they fit."""
    x, y, width, height = box
    ax.fill([x, x + width, x + width, x], [y, y, y + height, y + height], color=color, ec="w", lw=1)
    file = where.rpartition("/")[2]
    names = (where, file, file.partition(" (")[0])
    short = next((name for name in names if _fits(name, width)), "")
    if short and _fits(size, width) and height > 0.36:
        ax.text(
            x + 0.06,
            y + 0.06,
            f"{short}\n{size}",
            va="top",
            fontsize=8,
            color=_text_color(color),
            linespacing=1.25,
            **_PLAIN_TEXT,
        )


def _fits(text: str, width: float) -> bool:
    """Return whether a text of 8 points fits into a width in inches."""
    return len(text) * 0.072 < width - 0.12


def _text_color(color: str) -> str:
    """Return the text colour that is easier to read on a colour: dark or white."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 140 else _DARK


def _title(data: dict[str, Any]) -> str:
    """Return the title: the function, the target, the total, and the bytes that are left."""
    total, limit = data["total_bytes"], data["device"]["limit_bytes"]
    each = " on each device" if data["device"]["count"] > 1 else ""
    room = f" of {human_bytes(limit)}: the compiler refused it" if total is None else ""
    if limit and total is not None:
        spare = limit - total
        room = f", {human_bytes(abs(spare))} {'to spare' if spare >= 0 else 'too much'}"
    return f"{data['function']} on {data['target']}\n{human_bytes(total)}{each}{room}"


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

    >>> from xform.memory.report_plot import squarify
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
