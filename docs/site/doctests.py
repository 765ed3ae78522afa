"""Format docstrings for the site: doctests become code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

# From the first prompt to the next empty line, or to the end.
DOCTEST = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
LABEL = re.compile(r"^(Cost|Source|Bound|Note): ", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put fences around doctests, and make the labels of paragraphs bold."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring:
            value = DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
            obj.docstring.value = LABEL.sub(r"**\1**: ", value)
