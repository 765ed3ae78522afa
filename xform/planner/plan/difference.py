"""Describe how an equation that a plan recorded differs from an equation of a program.

A plan holds the text of the program that it was made for. If a user applies it to another program,
the error shows the first difference.
"""

from __future__ import annotations

import re

# In the texts, a loop, branch or call is written as `xform_fork` in the forward pass and as
# `xform_join` in the backward pass. The group of this pattern is the name of its own primitive,
# such as `scan`, which the error shows instead.
_STRUCTURED = re.compile(
    r"(?: int8\[0\])? = xform_(?:fork|join)@\S+?\[node=[\w.]+\(\((\w+), .*", re.S
)
# Longer equations are shown in part.
_MAX_LENGTH = 80


def difference(planned: str, actual: str) -> str:
    """Describe how a recorded equation differs from an equation of a program, in one line.

    `planned` and `actual` are the texts of the two equations; "" if there is no such equation.

    >>> difference("float32[3] = sin[] i0", "float32[3] = cos[] i0")
    'the plan has `float32[3] = sin[] i0`, the program `float32[3] = cos[] i0`'
    >>> difference("float32[3] = sin[] i0", "")
    'the plan has `float32[3] = sin[] i0`, the program has no more equations'
    """
    plan, program = (_STRUCTURED.sub(r" = \1", text) for text in (planned, actual))
    if plan == program:
        return f"both have `{plan}`, with different bodies, options or arguments"
    start = next((i for i, (a, b) in enumerate(zip(plan, program, strict=False)) if a != b), 0)
    has = "" if program else "has "
    return f"the plan has {_excerpt(plan, start)}, the program {has}{_excerpt(program, start)}"


def _excerpt(text: str, start: int) -> str:
    """Return the text of an equation. Shorten a long text to its operation and the difference.

    The difference is at the position `start`. "no more equations" stands for an empty text.
    """
    if not text:
        return "no more equations"
    if len(text) <= _MAX_LENGTH:
        return f"`{text}`"
    begin = text.rfind(" ", 0, start) + 1
    end = begin + _MAX_LENGTH
    operation = text.partition(" = ")[2].partition("[")[0]
    ellipsis = "..." if end < len(text) else ""
    return f"{f'{operation} with ' if begin else ''}`{text[begin:end]}{ellipsis}`"
