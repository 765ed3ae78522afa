"""`min_cut`: the policy that saves the fewest bytes. It is the default for compiled programs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from xform._jax import Primitive, conv_general_dilated_p, dot_general_p
from xform.policies.budgets import Regions, of_regions


@dataclasses.dataclass(frozen=True)
class MinCut:
    """A policy that minimizes the saved bytes plus the price of the recomputed work.

    It decides for a whole program at once. When called for one primitive, as JAX calls a policy, it
    saves products and convolutions.

    Attributes:
      price: the price, in bytes, of recomputing a FLOP of work that does not fuse. If it is
        infinite, such work is never recomputed.
      then: the price after the fraction `at` of each program.
      at: a fraction of the program, between 0 and 1.
      written: an extra price, for each byte, of saving a value that would otherwise be fused and
        never written to memory. So of two values of equal size, the result of a product is saved.
      apart: which bottlenecks of a program are free to save: 0 none, 1 all, 2 every second one, 3
        every third one, and so on, in order.
      free: whether the cut also decides inside remat regions without a policy, which otherwise save
        nothing.
      regions: "marked" to keep remat regions, "open" to dissolve them first, see `open_regions`.
      rounds: whether the compiler rounds the operands of products to half their bits, and stores
        only the rounded value if nothing else reads it. If so, a value that only products read
        costs half its bytes.
    """

    price: float = math.inf
    then: float = math.inf
    at: float = 1.0
    written: float = 0.0
    apart: int = 0
    free: bool = False
    regions: Regions = "marked"
    rounds: bool = False

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> bool:
        """Whether a primitive is expensive to recompute: a product or a convolution."""
        return prim in (dot_general_p, conv_general_dilated_p)

    def __repr__(self) -> str:
        price = "" if self.price == math.inf else f"(price={self.price:.3g} bytes/FLOP)"
        return of_regions(self.regions, f"min_cut{price}")


min_cut = MinCut(apart=2)
"""The default. It recomputes only operations that XLA fuses, and saves the fewest bytes for that.

Values at every second bottleneck of the program, such as between layers, are free to save.
"""
