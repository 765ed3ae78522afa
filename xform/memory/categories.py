"""Categories of the bytes in a report, with their colours in every picture of it.

The colours stay distinct for people who cannot see red, green or blue, on white and on near-black.
"""

from __future__ import annotations

from typing import NamedTuple


class Category(NamedTuple):
    """A category.

    Attributes:
      name: its name in a report.
      meaning: what its bytes are, for a reader of the picture.
      light, dark: its colour on a light and on a dark background.
    """

    name: str
    meaning: str
    light: str
    dark: str


# In the order in which pictures stack them: the longest-lived at the bottom.
CATEGORIES = (
    Category("parameter", "weights of the model", "#15407f", "#4a7ce0"),
    Category("optimizer state", "the optimizer's memory", "#6cc3ee", "#a9e4f7"),
    Category("argument", "other inputs, such as the batch", "#f3d527", "#f7ef2e"),
    Category("constant", "fixed by the program", "#5c2a1a", "#7d4425"),
    Category("code", "the compiled program", "#2a2833", "#36507a"),
    Category("output", "what the function returns", "#16855c", "#3fbf74"),
    Category("gradient", "derivatives of the parameters", "#b8470f", "#cf5a17"),
    Category("activation", "saved for the backward pass", "#f5a142", "#efb03f"),
    Category("recompute", "recomputed for the backward pass", "#b368cc", "#e38ac4"),
    Category("temporary", "intermediate values, soon freed", "#8b90a0", "#71778c"),
)
# Bytes that belong to no buffer.
REST = Category("not attributed", "padding and gaps", "#cdd3cb", "#50494c")
_BY_NAME = {c.name: c for c in CATEGORIES}


def category(name: str) -> Category:
    """Return the category with this name; `REST` for an unknown name."""
    return _BY_NAME.get(name, REST)
