"""`min_cut`: the policy that saves the fewest bytes, the default where programs are compiled."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from xform._jax import Primitive, conv_general_dilated_p, dot_general_p
from xform.policies.budgets import Regions, of_regions


@dataclasses.dataclass(frozen=True)
class MinCut:
    """The fewest bytes, where running work again has a price.

    It decides for a whole program at once; asked for one primitive, in JAX's protocol, it saves
    products and convolutions.

    Attributes:
      price: of a FLOP of work that does not fuse, in bytes. Infinite: it is never run again.
      then: the price after the part `at` of each program, which is between 0 and 1.
      written: the price of saving what would else be fused and not written to memory, for each of
        its bytes; of two values as large, that of a product is then saved.
      apart: of a program's narrow places, in order, every second (2), third (3) and so on is one at
        which saving what crosses costs nothing; 1: all are, 0: none is.
      free: whether it decides in remat regions too whose author gave no policy, which else save
        nothing.
      regions: "marked" where remat regions are what their authors made them, "open" where they are
        dissolved first, see `open_regions`.
      rounds: whether the compiler rounds what products read, and keeps half the bits where nothing
        else reads it: then a value that products alone read is priced by half its bytes.
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
        """Whether a primitive is one that is costly to run again."""
        return prim in (dot_general_p, conv_general_dilated_p)

    def __repr__(self) -> str:
        price = "" if self.price == math.inf else f"(price={self.price:.3g} bytes/FLOP)"
        return of_regions(self.regions, f"min_cut{price}")


min_cut = MinCut(apart=2)
"""The fewest bytes such that only what XLA fuses is run again, and what crosses between layers."""
