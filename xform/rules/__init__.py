"""The library's own rules; importing this package fills `table.RULES`."""

from xform.rules import (
    branch,
    call,
    collective,
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
    shard,
    window,
)

__all__ = [
    "branch",
    "call",
    "collective",
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
    "shard",
    "window",
]
