"""Passes: program transforms that preserve results.

`Pipeline([...])(f)` returns a function with the signature and the results of `f`, whose program is
rewritten by the passes. A pass is a frozen dataclass, and its fields are its options. To write a
pass, subclass `Pass`.

| pass | does |
| --- | --- |
| `Inline` | inlines calls of jitted functions |
| `OpenRegions` | inlines remat regions (`jax.checkpoint`) |
| `RegionPolicy(policy)` | gives remat regions with named values another policy |
| `Fold` | evaluates operations on constants |
| `Simplify` | applies algebraic simplifications that are exact for every value |
| `Cse` | merges equal equations (common subexpressions) |
| `SumInLoops` | adds the stacked results of a loop to an array inside the loop |
| `Dce` | drops equations that no output depends on (dead code) |
"""

from xform.passes.base import Pass, PassResult, Pipeline
from xform.passes.cse import Cse
from xform.passes.dce import Dce
from xform.passes.fold import Fold
from xform.passes.inline import Inline
from xform.passes.listing import listing
from xform.passes.open_regions import OpenRegions
from xform.passes.region_policy import RegionPolicy
from xform.passes.simplify import Simplify
from xform.passes.sum_in_loops import SumInLoops
from xform.passes.verify import verify

__all__ = [
    "PASSES",
    "Cse",
    "Dce",
    "Fold",
    "Inline",
    "OpenRegions",
    "Pass",
    "PassResult",
    "Pipeline",
    "RegionPolicy",
    "Simplify",
    "SumInLoops",
    "listing",
    "verify",
]

PASSES: dict[str, type[Pass]] = {
    p.name: p for p in (Inline, OpenRegions, Fold, Simplify, Cse, Dce, SumInLoops)
}
