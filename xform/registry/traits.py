"""Traits: the properties of a primitive besides its derivative.

They tell how the compiler treats an equation, what it costs, and which rewrites are allowed. They
are part of the primitive's rule: `table.traits(eqn.primitive)` returns them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from xform._jax import JaxprEqn
from xform.registry.reach import EACH, MOVED, Reach

Count = Callable[[JaxprEqn], float]


def none(eqn: JaxprEqn) -> float:
    """The count of FLOPs or bytes of an equation that takes none."""
    return 0.0


@dataclasses.dataclass(frozen=True)
class Traits:
    """The properties of a primitive besides its derivative.

    The planner does not choose to recompute equations that are `random`, `collective` or
    `foreign`. They are recomputed only under a policy that saves exactly the values it names.

    Attributes:
      fusion: how XLA fuses it with its neighbours: as an elementwise operation, a movement of data
        (no FLOPs) or a reduction; "" if it runs as a kernel of its own.
      view: the result holds the elements of the operand, reshaped or repeated. It is never saved,
        because it costs nothing to make from the operand.
      identity: the result equals the operand, with a name, a sharding or a mark attached.
      pools: reduces each of many windows of the operand to one element.
      dear: so expensive per element that XLA does not duplicate it into every reader.
      pure: an equal equation may replace it. False for primitives that keep the compiler from
        merging values, such as barriers.
      foldable: may be evaluated at trace time if its inputs are known. Calls never are.
      random: draws random numbers, or makes keys.
      collective: communicates between the devices of a mesh.
      foreign: a kernel, a callback or a transfer, which the compiler cannot analyze.
      call: for a call, the parameter that holds the called program.
      calls: the meaning of a call beyond its body: "" for none, a "custom" derivative, a remat
        "region", a "mark" of how to run it.
      flops: a function that counts its FLOPs. None: one per element of the results (of the operand,
        for a reduction; none for a movement).
      bytes: a function that counts the bytes of memory traffic of a recompute. None: the bytes of
        the results (of the operands, for a reduction).
      lowered: a function that returns the `Program` that replaces it on CPUs and GPUs, or None if
        unknown. None: it is an XLA operation, or opaque to XLA.
      reach: on which elements of the operands an element of the result depends. None: on all
        elements of every operand that it has a derivative in.
    """

    fusion: Literal["elementwise", "movement", "reduction", ""] = ""
    view: bool = False
    identity: bool = False
    pools: bool = False
    dear: bool = False
    pure: bool = True
    foldable: bool = True
    random: bool = False
    collective: bool = False
    foreign: bool = False
    call: str = ""
    calls: Literal["", "custom", "region", "mark"] = ""
    flops: Count | None = dataclasses.field(default=None, compare=False)
    bytes: Count | None = dataclasses.field(default=None, compare=False)
    lowered: Callable[[JaxprEqn], Any] | None = dataclasses.field(default=None, compare=False)
    reach: Reach | None = dataclasses.field(default=None, compare=False)

    @property
    def folds(self) -> bool:
        """Whether it is evaluated at trace time if its inputs are known. Calls never are."""
        return self.foldable and not (self.call or self.calls)

    @property
    def fusible(self) -> bool:
        """Whether XLA fuses it with the readers of its result."""
        return bool(self.fusion)

    @property
    def repeatable(self) -> bool:
        """Whether the planner may choose to recompute it."""
        return not (self.random or self.collective or self.foreign)

    @property
    def named(self) -> list[str]:
        """Words for the traits that differ from the default."""
        default = Traits()
        words: list[str] = [self.fusion] if self.fusion else []
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value == getattr(default, field.name) or field.name == "reach":
                continue
            if isinstance(value, str):
                words.append(f"{field.name}={value}")
            elif isinstance(value, bool):
                words.append(field.name if value else f"not {field.name}")
            else:
                words.append(f"own {field.name}")
        return words


UNKNOWN = Traits(foldable=False)
PLAIN = Traits()
ELEMENTWISE = Traits("elementwise", reach=EACH)
DEAR = Traits("elementwise", dear=True, reach=EACH)
MOVEMENT = Traits("movement", reach=MOVED)
VIEW = Traits("movement", view=True, reach=MOVED)
# A conversion: counted as a movement, but each element stays where it is.
CONVERSION = Traits("movement", reach=EACH)
REDUCTION = Traits("reduction")
# No FLOPs, and no loop over elements.
MARK = Traits(identity=True, flops=none, reach=EACH)
UNFUSED = Traits(flops=none)
RANDOM = Traits(random=True)
COLLECTIVE = Traits(collective=True)
EXCHANGE = Traits(collective=True, flops=none)
FOREIGN = Traits(foreign=True, foldable=False)
