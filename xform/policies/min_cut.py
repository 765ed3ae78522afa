"""`min_cut`: the default policy of compiled programs. A minimum cut decides what to save.

Each value that the backward pass reads is saved, at a price of its bytes, or recomputed, at the
price of its work. The policy minimizes the sum of these prices. By default, work that XLA does not
fuse has an infinite price, so only operations that XLA fuses are recomputed.

A *bottleneck* is a place in the forward pass between two expensive operations, such as products,
where fewer bytes cross than at the neighbouring places. An example is the place between two layers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from xform._jax import Primitive
from xform.policies.budgets import Regions, policy_text
from xform.registry.table import traits


@dataclasses.dataclass(frozen=True)
class MinCut:
    """A policy that minimizes the saved bytes plus a price times the recomputed FLOPs.

    The sum counts the FLOPs of operations that XLA does not fuse, such as products. Operations that
    XLA fuses have a small price for each byte instead. The saved bytes are those of the values'
    types, but `bottleneck_stride`, `fused_save_price` and `rounds_operands` change the price of
    saving some values.

    The policy decides about all values of a program at once. JAX calls a policy for one primitive
    at a time, without the program. This policy then saves products and convolutions.

    Attributes:
      early_price: the price, in bytes, of each recomputed FLOP of operations that XLA does not
        fuse. With an infinite price they are never recomputed. It holds up to the place
        `switch_at`.
      late_price: the price that replaces `early_price` after the place `switch_at`.
      switch_at: a fraction between 0 and 1. `early_price` holds for this fraction of the equations
        of each program that XLA does not fuse, from the first one, and `late_price` for the rest.
        With 1.0, `early_price` holds for the whole program.
      fused_save_price: an extra price, for each byte, of saving a value that XLA would otherwise
        fuse into its readers and never write to memory. So if the result of a product and a fused
        value take equal bytes, the result of the product is saved, because it is in memory in any
        case.
      bottleneck_stride: which bottlenecks are free: the values that cross a free bottleneck cost
        nothing to save. 0: none is free; 1: all are; 2: every second one in program order; 3: every
        third one; and so on.
      in_regions: whether the cut also decides inside remat regions without a policy. Otherwise
        these regions save nothing.
      regions: "marked" keeps the remat regions of the program, which then decide what they save;
        "open" dissolves them first, see `open_regions`.
      rounds_operands: whether the compiler rounds the operands of products to half their bits, as
        on TPUs, and stores only the rounded value if nothing else reads the operand. Then the price
        of saving a value that only products read is half its bytes.
      slow_price: the price of each byte that is recomputed by a slow elementwise function, such as
        `exp`. With 1/4, recomputing four such functions costs as much as saving one value of the
        same size.
    """

    early_price: float = math.inf
    late_price: float = math.inf
    switch_at: float = 1.0
    fused_save_price: float = 0.0
    bottleneck_stride: int = 0
    in_regions: bool = False
    regions: Regions = "marked"
    rounds_operands: bool = False
    slow_price: float = 0.0

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> bool:
        """Return whether JAX saves the primitive's result: true for a product or a convolution."""
        return bool(traits(prim).product)

    def __repr__(self) -> str:
        price = "" if self.early_price == math.inf else f"(price={self.early_price:.3g} bytes/FLOP)"
        return policy_text(self.regions, f"min_cut{price}")


min_cut = MinCut(bottleneck_stride=2)
"""The default policy. Its price is infinite, so it recomputes only operations that XLA fuses.

Among the choices that do this, it saves the fewest bytes, where the values that cross every second
bottleneck count as zero bytes. Saving these values keeps a chain of cheap recomputes from reaching
back over many layers, whose values would all be live at once.

If the simulated peak of a whole function is lower when everything is saved, everything is saved.
This happens, for example, where the work on one layer is the peak. On a CPU, `slow_price` is 1/4.
"""
