"""Draw plots with matplotlib, among them the plot of a plan.

All plots of xform have this style. matplotlib is imported only when a plot is drawn. The argument
`caller` is the name of the function that the user called, for errors.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xform.errors import MissingExtra, WrongArgument
from xform.introspection.packages import pip_argument
from xform.storage.files import atomic_write
from xform.terminal.text import human_bytes

_MIB = 2**20
BLUE, ORANGE, GREY, PURPLE = "#2b6cb0", "#dd6b20", "#a0aec0", "#805ad5"


def new_figure(caller: str, width: float, height: float) -> Any:
    """Return an empty figure, of this size in inches. matplotlib's global state does not change."""
    return figure_module(caller).Figure(figsize=(width, height), dpi=130, layout="constrained")


def figure_module(caller: str) -> Any:
    """Return the module `matplotlib.figure`.

    Raises:
      MissingExtra: matplotlib is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingExtra(
            caller,
            "matplotlib is not installed",
            "",
            f"install it: pip install {pip_argument('plot')}, or pip install matplotlib",
        ) from error


def new_axes(caller: str, width: float = 8.4, height: float = 4.6) -> tuple[Any, Any]:
    """Return a new figure with one plot, and the Axes of that plot."""
    figure = new_figure(caller, width, height)
    ax = figure.add_subplot()
    style_axes(ax)
    return figure, ax


def style_axes(ax: Any) -> None:
    """Give a plot a faint grid behind the data, and no box around it."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.set_axisbelow(True)


def save_figure(figure: Any, caller: str, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file, in the format of the file's suffix, such as ".png".

    Raises:
      WrongArgument: matplotlib does not know the format.
    """
    if (suffix := Path(path).suffix[1:].lower()) not in figure.canvas.get_supported_filetypes():
        raise WrongArgument(
            f"{caller}({str(path)!r})",
            f"{suffix!r} is not an image format" if suffix else "the file name has no suffix",
            "",
            "end the file name in .png, .svg or .pdf",
        )
    with atomic_write(path) as partial:
        figure.savefig(partial)


def draw_live_bytes(
    path: str | os.PathLike[str], title: str, live: Sequence[int], saved: Sequence[int], fixed: int
) -> None:
    """Draw the live bytes at each step of a program.

    Args:
      path: the file to write; its suffix chooses the format.
      title: the title of the plot.
      live: bytes of the temporary values that are live at each step.
      saved: bytes of the values among them that are saved for the backward pass.
      fixed: bytes of arguments and outputs, which are live at all steps and are not drawn.
    """
    figure, ax = new_axes("Plan.plot")
    steps = range(len(live))
    mib = lambda values: [v / _MIB for v in values]
    saved_live = [min(s, n) for s, n in zip(saved, live, strict=True)]
    style: dict[str, Any] = {"step": "post", "linewidth": 0}
    ax.fill_between(
        steps, mib(saved_live), color=BLUE, label="saved for the backward pass", **style
    )
    ax.fill_between(
        steps, mib(saved_live), mib(live), color=GREY, label="other temporary values", **style
    )
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
    ax.set_title(f"{title}\nplus {human_bytes(fixed)} of arguments and outputs", loc="left")
    ax.set_xlabel("step of the compiled program, in execution order")
    ax.set_ylabel("temporary MiB")
    ax.legend(frameon=False, loc="upper left")
    save_figure(figure, "Plan.plot", path)
