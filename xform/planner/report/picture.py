"""Pictures, and that of a plan. matplotlib is loaded when one is drawn: xform does not need it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xform.errors import MissingExtra, WrongArgument
from xform.introspection.packages import extra
from xform.storage.files import whole
from xform.terminal.text import human_bytes

_MIB = 2**20
BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#a0aec0"


def sheet(asked: str, width: float, height: float) -> Any:
    """An empty figure, with nothing of the user's matplotlib touched."""
    return figures(asked).Figure(figsize=(width, height), dpi=130, layout="constrained")


def figures(asked: str) -> Any:
    """The module of matplotlib's figures; `MissingExtra` where matplotlib is not installed."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtra(
            asked,
            "matplotlib is not installed",
            "",
            f"install it: pip install {extra('plot')}, or pip install matplotlib",
        ) from error


def axes(asked: str, width: float = 8.4, height: float = 4.6) -> tuple[Any, Any]:
    """A figure with one plot in it, and that plot."""
    figure = sheet(asked, width, height)
    ax = figure.add_subplot()
    plain(ax)
    return figure, ax


def plain(ax: Any) -> None:
    """The style of a plot: a faint grid behind it, and no box."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.set_axisbelow(True)


def save(figure: Any, asked: str, path: str | os.PathLike[str]) -> None:
    """Write a figure, in the format that the file's name says."""
    if (kind := Path(path).suffix[1:].lower()) not in figure.canvas.get_supported_filetypes():
        raise WrongArgument(
            f"{asked}({str(path)!r})",
            f"{kind!r} is no format of pictures" if kind else "the name of the file has no suffix",
            "",
            "end the name in .png, .svg or .pdf",
        )
    with whole(path) as partial:
        figure.savefig(partial)


def draw(
    path: str | os.PathLike[str], title: str, live: Sequence[int], saved: Sequence[int], fixed: int
) -> None:
    """Live bytes over the steps of a program, of which `saved` wait for the backward pass.

    `fixed` bytes are arguments and outputs, which are there all the time.
    """
    figure, ax = axes("Plan.plot")
    at = range(len(live))
    mib = lambda values: [v / _MIB for v in values]
    both = [min(s, n) for s, n in zip(saved, live, strict=True)]
    kind: dict[str, Any] = {"step": "post", "linewidth": 0}
    ax.fill_between(at, mib(both), color=BLUE, label="saved for the backward pass", **kind)
    ax.fill_between(at, mib(both), mib(live), color=GREY, label="in work", **kind)
    if live:
        peak = max(live)
        i = live.index(peak)
        ax.annotate(
            f"peak {human_bytes(peak)}",
            (i, peak / _MIB),
            xytext=(0, 10),
            textcoords="offset points",
            ha="center",
            color=ORANGE,
        )
        ax.plot([i], [peak / _MIB], "o", color=ORANGE, markersize=5)
        ax.set_ylim(0, 1.15 * peak / _MIB or 1)
    ax.set_title(f"{title}\n{human_bytes(fixed)} of arguments and outputs beside", loc="left")
    ax.set_xlabel("step of the compiled program, in the order in which it runs")
    ax.set_ylabel("temporary MiB")
    ax.legend(frameon=False, loc="upper left")
    save(figure, "Plan.plot", path)
