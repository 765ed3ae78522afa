"""Plain text for a terminal: aligned tables, and numbers with units."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Sequence

import numpy as np

BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")


def human_bytes(n: int | None) -> str:
    """Return a byte count as text, in B, KiB, MiB, GiB or TiB; for None, "not known".

    >>> from xform.terminal.text import human_bytes
    >>> human_bytes(512), human_bytes(1536), human_bytes(3 * 2**30), human_bytes(None)
    ('512 B', '1.5 KiB', '3.0 GiB', 'not known')
    """
    if n is None:
        return "not known"
    return _scale(n, 1024, BYTES)


def parse_bytes(text: str) -> int:
    """Parse a byte count with an optional unit: `6 GiB`, `1.5GB`, `512 MB`, `1000`, `1e9`.

    KiB, MiB, ... are powers of 1024; KB, MB, ... are powers of 1000. Raises ValueError if the text
    is not a byte count.

    >>> from xform.terminal.text import parse_bytes
    >>> parse_bytes("1.5 KiB"), parse_bytes("2MB")
    (1536, 2000000)
    """
    number = r"(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
    match = re.fullmatch(rf"\s*({number})\s*(?:([KMGT])(i?))?B?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a number of bytes")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    bytes = float(number) * base ** ("KMGT".index(prefix.upper()) + 1 if prefix else 0)
    if math.isinf(bytes):
        raise ValueError(f"{text!r} is too large")
    return round(bytes)


def byte_count(amount: float | str) -> int:
    """Convert a whole number or a string to a byte count.

    Raises ValueError or TypeError for anything else, and for negative numbers.

    >>> from xform.terminal.text import byte_count
    >>> byte_count(16e9), byte_count("1e9")
    (16000000000, 1000000000)
    """
    if isinstance(amount, bool):
        raise TypeError(f"{amount!r} is not a number of bytes")
    if isinstance(amount, str):
        n = parse_bytes(amount)
    elif isinstance(amount, float | np.floating):
        if not float(amount).is_integer():
            raise ValueError(f"{amount!r} is not a whole number")
        n = int(amount)
    else:
        n = operator.index(amount)
    if n < 0:
        raise ValueError(f"{amount!r} is negative")
    return n


def human_flops(n: int) -> str:
    """Return a FLOP count as text, in powers of 1000: `1.5 GFLOP`."""
    return _scale(n, 1000, FLOPS)


def recomputed_flops(n: int) -> str:
    """Return a text about `n` recomputed FLOPs, which leave out the operations that XLA fuses.

    >>> from xform.terminal.text import recomputed_flops
    >>> recomputed_flops(1_500_000_000)
    '1.5 GFLOP of unfused operations recomputed'
    """
    return f"{human_flops(n)} of unfused operations recomputed"


def human_seconds(seconds: float) -> str:
    """Return a time as text, in s, ms or us.

    >>> from xform.terminal.text import human_seconds
    >>> human_seconds(2.5), human_seconds(0.0123)
    ('2.5 s', '12.3 ms')
    """
    for unit, scale in (("s", 1), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def unit_of(n: float, base: int, units: Sequence[str]) -> tuple[str, int]:
    """Return the unit in which to write `n`, and the size of that unit in the first unit.

    `n` is in the first of `units`. Each unit is `base` times the one before.

    >>> from xform.terminal.text import BYTES, unit_of
    >>> unit_of(3 * 2**20, 1024, BYTES)
    ('MiB', 1048576)
    """
    power = 0
    # A number that would be rounded up to the base is shown in the next unit.
    while abs(n) / base**power >= base - 0.05 and power < len(units) - 1:
        power += 1
    return units[power], base**power


def _scale(n: int, base: int, units: Sequence[str]) -> str:
    """Return `n` with a unit, such as `1.5 KiB`; with one decimal, except in the first unit."""
    unit, scale = unit_of(n, base, units)
    return f"{n} {unit}" if scale == 1 else f"{n / scale:.1f} {unit}"


def first_few(names: Sequence[str], most: int = 3) -> str:
    """Return a text with the first `most` of some names, and the number of further names.

    >>> from xform.terminal.text import first_few
    >>> first_few(["w", "b"]), first_few(["a", "b", "c", "d", "e"])
    ('w, b', 'a, b, c and 2 more')
    """
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def planning_times(seconds: float, programs: int, compile_seconds: float) -> str:
    """Format the time of planning without compilations, and the time of the compilations.

    >>> from xform.terminal.text import planning_times
    >>> planning_times(23, 4, 155.0), planning_times(0.5, 0, 0)
    (', planned in 23.0 s, 4 programs compiled in 155.0 s', ', planned in 500.0 ms')
    """
    text = f", planned in {human_seconds(seconds)}" if seconds else ""
    if programs:
        text += f", {programs} program{'s' * (programs != 1)} compiled"
        text += f" in {human_seconds(compile_seconds)}" if compile_seconds else ""
    return text


# The folder that packages are installed in.
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")


def shorten_place(where: str) -> str:
    """Return `file:line (function)` with the shortest path.

    It is relative to the current folder; for an installed package, to the folder of packages.

    >>> from xform.terminal.text import shorten_place
    >>> shorten_place("/venv/lib/python3.12/site-packages/maxtext/llama2.py:7 (f)")
    'maxtext/llama2.py:7 (f)'
    """
    path, line, rest = where.rpartition(".py:")
    if not path or path.startswith("<"):
        return where
    return min(path, os.path.relpath(path), _PACKAGES.sub("", path), key=len) + line + rest


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Format rows of cells as a text with aligned columns.

    All rows have the same number of cells. `right` has the indices of the right-aligned columns.

    >>> from xform.terminal.text import columns
    >>> print(columns([["argument", "8 B"], ["temp", "512 B"]], right=[1]))
    argument    8 B
    temp      512 B
    """
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            pad + cell if i in right else cell + pad
            for i, (cell, pad) in enumerate(
                (cell, " " * (width - _width(cell)))
                for cell, width in zip(row, widths, strict=True)
            )
        ).rstrip()
        for row in rows
    )


# Escape sequences that set a terminal's colour.
_ANSI = re.compile("\x1b\\[[0-9;]*m")


def _width(cell: str) -> int:
    """Return the number of characters that a terminal shows of a text."""
    return len(_ANSI.sub("", cell)) if "\x1b" in cell else len(cell)
