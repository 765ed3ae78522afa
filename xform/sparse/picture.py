"""Pictures of sparsity patterns: in characters, and with matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from xform.planner.report.picture import BLUE, new_figure, save_figure

# Maximum numbers of rows and columns in characters. In a larger matrix, a character is a block.
_ROWS, _COLS = 24, 48


def dots(rows: np.ndarray, cols: np.ndarray, shape: Sequence[int]) -> list[str]:
    """Return the lines of a picture: `#` for a nonzero, `.` for a zero.

    `rows` and `cols` hold the row and the column of each nonzero of a matrix of `shape`. In a large
    matrix a character stands for a block, and `#` is a block with a nonzero.
    """
    m, n = (min(size, limit) for size, limit in zip(shape, (_ROWS, _COLS), strict=True))
    blocks = np.zeros((m, n), bool)
    if len(rows):
        blocks[rows * m // shape[0], cols * n // shape[1]] = True
    return [" ".join("#" if nonzero else "." for nonzero in line) for line in blocks]


def draw(path: str | os.PathLike[str], rows: np.ndarray, cols: np.ndarray, shape: Sequence[int],
         title: str, colors: np.ndarray | None) -> None:  # fmt: skip
    """Draw the nonzeros of a matrix to a file.

    Args:
      path: the file.
      rows: the row of each nonzero.
      cols: the column of each nonzero.
      shape: the shape of the matrix.
      title: the title of the picture.
      colors: a number for each nonzero, which selects its colour; None: all are blue.
    """
    m, n = shape
    longer = max(m, n, 1)
    width, height = 1.4 + 4.6 * n / longer, 1.2 + 4.6 * m / longer
    figure = new_figure("plot", max(width, 4.2), max(height, 2.4))
    ax = figure.add_subplot()
    size = (3.2 * 72 / longer) ** 2
    color_options = {"c": BLUE} if colors is None else {"c": colors % 20, "cmap": "tab20",
                                                        "vmin": 0, "vmax": 19}  # fmt: skip
    ax.scatter(cols, rows, s=min(max(size, 0.15), 120), marker="s", linewidths=0,
               **color_options)  # fmt: skip
    ax.set(xlim=(-0.5, n - 0.5), ylim=(m - 0.5, -0.5), aspect="equal")
    ax.set_xlabel("input")
    ax.set_ylabel("output")
    ax.set_title(title.replace(", at most", ",\nat most"), fontsize=8)
    save_figure(figure, "plot", path)
