"""The first difference of two programs, in words that fit into one line."""

from __future__ import annotations

import re

# An equation that holds programs, with the primitive that it stands for: a loop, a branch, a call.
_STRUCTURED = re.compile(
    r"(?: int8\[0\])? = xform_(?:fork|join)@\S+?\[node=[\w.]+\(\((\w+), .*", re.S
)
_LONGEST = 80


def difference(then: str, now: str) -> str:
    """Tell how an equation of a plan differs from the one of a program. Either may be missing: "".

    >>> difference("float32[3] = sin[] i0", "float32[3] = cos[] i0")
    'the plan has `float32[3] = sin[] i0`, the program `float32[3] = cos[] i0`'
    >>> difference("float32[3] = sin[] i0", "")
    'the plan has `float32[3] = sin[] i0`, the program no more'
    """
    plan, program = (_STRUCTURED.sub(r" = \1", text) for text in (then, now))
    if plan == program:
        return f"both have `{plan}`, with other bodies, options or arguments"
    start = next((i for i, (a, b) in enumerate(zip(plan, program, strict=False)) if a != b), 0)
    return f"the plan has {_part(plan, start)}, the program {_part(program, start)}"


def _part(text: str, start: int) -> str:
    """An equation; of a long one its beginning, and what stands where the difference starts."""
    if not text:
        return "no more"
    if len(text) <= _LONGEST:
        return f"`{text}`"
    begin = text.rfind(" ", 0, start) + 1
    operation = text.partition(" = ")[2].partition("[")[0]
    rest = "..." if begin + _LONGEST < len(text) else ""
    return f"{f'{operation} with ' if begin else ''}`{text[begin : begin + _LONGEST]}{rest}`"
