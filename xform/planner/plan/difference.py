"""Describe how an equation that a plan recorded differs from an equation of a program.

A plan holds the text of the program that it was made for. If a user applies it to another program,
the error shows the first difference.
"""

from __future__ import annotations

import re

# In the texts, a loop, branch or call is a pair `xform_fork`, `xform_join` for its forward and its
# backward pass. The group is the name of its own primitive, which is shown instead.
_STRUCTURED = re.compile(
    r"(?: int8\[0\])? = xform_(?:fork|join)@\S+?\[node=[\w.]+\(\((\w+), .*", re.S
)
# Longer equations are shown in part.
_MAX_LENGTH = 80


def difference(planned: str, actual: str) -> str:
    """Describe how a recorded equation differs from that of a program, in one line.

    `planned` and `actual` are their texts; "" if there is no such equation.

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
    """Return an equation, or of a long one its operation and the text around the difference.

    The difference is at the position `start`.
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
