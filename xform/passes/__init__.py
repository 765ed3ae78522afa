"""Passes: changes of a program that keep what it computes.

`Pipeline([...])(f)` is `f` with its program changed, of the same signature. Each pass is a frozen
dataclass whose fields are its options; to write one, subclass `Pass`.

| pass | does |
| --- | --- |
| `Inline` | opens calls |
| `OpenRegions` | opens remat regions |
| `Fold` | runs operations on constants now |
| `Simplify` | algebra that is exact for every value |
| `Cse` | merges equations that are alike |
| `Dce` | drops what nothing reads |
"""

from xform.passes.base import Pass, Pipeline, Step
from xform.passes.cse import Cse
from xform.passes.dce import Dce
from xform.passes.fold import Fold
from xform.passes.inline import Inline
from xform.passes.listing import listing
from xform.passes.open_regions import OpenRegions
from xform.passes.simplify import Simplify
from xform.passes.verify import verify

__all__ = [
    "PASSES",
    "Cse",
    "Dce",
    "Fold",
    "Inline",
    "OpenRegions",
    "Pass",
    "Pipeline",
    "Simplify",
    "Step",
    "listing",
    "verify",
]

PASSES: dict[str, type[Pass]] = {p.name: p for p in (Inline, OpenRegions, Fold, Simplify, Cse, Dce)}
