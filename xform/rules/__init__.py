"""The library's own rules; importing this package fills `table.RULES`."""

from xform.rules import (
    branch,
    call,
    contract,
    custom,
    fft,
    indexing,
    linalg,
    loop,
    pointwise,
    random,
    reduce,
    shape,
    window,
)

__all__ = [
    "branch",
    "call",
    "contract",
    "custom",
    "fft",
    "indexing",
    "linalg",
    "loop",
    "pointwise",
    "random",
    "reduce",
    "shape",
    "window",
]
