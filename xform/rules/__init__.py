"""xform's rules for JAX's primitives, one file for each family of primitives.

Importing a file declares its rules. So importing this package fills the registry
(`xform.registry.table.RULES`).
"""

from xform.registry.table import set_fallback
from xform.rules import (
    branch,
    call,
    collective,
    contract,
    custom,
    custom_vmap,
    eigen,
    factor,
    fft,
    foreign,
    hijax,
    indexing,
    linalg,
    linear_call,
    loop,
    marked_call,
    opaque,
    pointwise,
    random,
    reduce,
    reference,
    refused,
    shape,
    shard,
    sparse,
    special,
    while_loop,
    window,
)

set_fallback(foreign.foreign_rule)

__all__ = [
    "branch",
    "call",
    "collective",
    "contract",
    "custom",
    "custom_vmap",
    "eigen",
    "factor",
    "fft",
    "foreign",
    "hijax",
    "indexing",
    "linalg",
    "linear_call",
    "loop",
    "marked_call",
    "opaque",
    "pointwise",
    "random",
    "reduce",
    "reference",
    "refused",
    "shape",
    "shard",
    "sparse",
    "special",
    "while_loop",
    "window",
]
