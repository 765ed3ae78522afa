"""Describe how an equation of a plan differs from the program's equation, in one line."""

from __future__ import annotations

import re

# A fork or join of a loop, branch or call. The group is the primitive that it stands for.
_STRUCTURED = re.compile(
    r"(?: int8\[0\])? = xform_(?:fork|join)@\S+?\[node=[\w.]+\(\((\w+), .*", re.S
)
_LONGEST = 80


def difference(planned: str, actual: str) -> str:
    """Describe how an equation of a plan differs from the one of a program; "" is a missing one.

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
    """An equation; of a long one, its operation and the text where the difference starts."""
    if not text:
        return "no more equations"
    if len(text) <= _LONGEST:
        return f"`{text}`"
    begin = text.rfind(" ", 0, start) + 1
    operation = text.partition(" = ")[2].partition("[")[0]
    ellipsis = "..." if begin + _LONGEST < len(text) else ""
    return f"{f'{operation} with ' if begin else ''}`{text[begin : begin + _LONGEST]}{ellipsis}`"
