"""`Result`: the base class of results that show themselves in a terminal and in a notebook."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from xform.errors import MissingExtra
from xform.storage import results

# Tables keep their columns. If they are wider than the page, the text scrolls.
_TEXT = "overflow-x: auto; line-height: 1.35; white-space: pre; margin: 0"
# A line of prose is broken where the page ends. A line of a table has two spaces between columns.
# So has a line of an error, after its first word: `remedy:  give a budget`.
PROSE = re.compile(r"^(?!(?:\s*\w+: +)?+.*\S {2,}\S).{60,}$", re.MULTILINE)


class Result:
    """A result with a text for terminals, HTML for notebooks, and plain data.

    A subclass defines `__str__`. If it also defines `plot(path)`, a notebook shows that picture
    under the text. A dataclass must be declared with `repr=False`.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]

    def to_json(self) -> str:
        """Return the result as JSON. Arrays become lists; NaN and infinity become null."""
        return json.dumps(_plain(self.to_dict()), allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result to a file, as JSON; `xform.load` reads it.

        The file is written completely or not at all.

        Raises:
          WrongArgument: the name of the file ends like that of a picture or a page.
          FileNotWritten: the file cannot be written.
        """
        results.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a result of this class that `save` wrote.

        Raises:
          WrongArgument: the file holds another result or none, or another version of xform wrote
            it.
          OSError: the file cannot be read.
        """
        return results.load_as(cls.__name__, path)

    def for_file(self) -> Self:
        """Return the result to write to a file instead of this one."""
        return self

    def heading(self) -> str:
        """Return one line that says which result this is."""
        return str(self).strip().partition("\n")[0]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.heading()}>"

    def _repr_html_(self) -> str:
        """Return the text and the picture, for Jupyter."""
        text = html.escape(str(self))
        text = PROSE.sub(r'<span style="white-space: pre-wrap">\g<0></span>', text)
        return f'<pre style="{_TEXT}">{text}</pre>{self._picture()}'

    def _picture(self) -> str:
        """Return the picture as SVG, or "" if there is none or matplotlib is not installed."""
        plot: Any = getattr(self, "plot", None)
        if plot is None:
            return ""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "picture.svg"
            try:
                plot(path)
            except MissingExtra:
                return ""
            text = path.read_text(encoding="utf-8")
        return f'<div style="max-width: 900px">{_scalable(text[text.index("<svg") :])}</div>'


def _scalable(svg: str) -> str:
    """Return a picture that becomes as wide as the page has room for."""
    head, end, rest = svg.partition(">")
    return f'{head} style="max-width: 100%; height: auto"{end}{rest}'


def _plain(data: Any) -> Any:
    """Return data that JSON can hold."""
    match data:
        case np.ndarray() | np.generic():
            return _plain(data.tolist())
        case Mapping():
            return {str(k): _plain(v) for k, v in data.items()}
        case str() | bool() | int() | None:
            return data
        case float():
            return data if math.isfinite(data) else None
        case Sequence() | set() | frozenset():
            return [_plain(v) for v in data]
        case _:
            return _plain(np.asarray(data)) if hasattr(data, "__array__") else str(data)
