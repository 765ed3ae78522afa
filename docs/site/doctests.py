"""Docstrings for the site: their doctests become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

# From the first prompt to the empty line, or the end, after it.
DOCTEST = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
LABEL = re.compile(r"^(Cost|Source|Bound|Note): ", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts fences around doctests, and makes the labels of paragraphs bold."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring:
            value = DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
            obj.docstring.value = LABEL.sub(r"**\1**: ", value)
