"""What the bytes of a report are for, and the colours that say so in every picture of it.

The colours differ for people who see no red, no green or no blue, on white and on near-black.
"""

from __future__ import annotations

from typing import NamedTuple


class Category(NamedTuple):
    name: str
    meaning: str
    light: str
    dark: str


# In the order in which they are stacked: what lives longest lies lowest.
CATEGORIES = (
    Category("parameter", "weights of the model", "#15407f", "#4a7ce0"),
    Category("optimizer state", "the optimizer's memory", "#6cc3ee", "#a9e4f7"),
    Category("argument", "other inputs, such as the batch", "#f3d527", "#f7ef2e"),
    Category("constant", "fixed by the program", "#5c2a1a", "#7d4425"),
    Category("code", "compiled instructions", "#2a2833", "#36507a"),
    Category("output", "what the function returns", "#16855c", "#3fbf74"),
    Category("gradient", "derivatives of the parameters", "#b8470f", "#cf5a17"),
    Category("activation", "kept for the backward pass", "#f5a142", "#efb03f"),
    Category("recompute", "run again for the backward pass", "#b368cc", "#e38ac4"),
    Category("temporary", "in work, soon free", "#8b90a0", "#71778c"),
)
REST = Category("not attributed", "padding and gaps", "#cdd3cb", "#50494c")
_OF = {c.name: c for c in CATEGORIES}


def category(name: str) -> Category:
    """The category of this name; `REST` for one that is not known."""
    return _OF.get(name, REST)
