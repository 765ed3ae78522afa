"""Traits: what xform knows of a primitive besides its derivative.

They stand in the primitive's rule, and nowhere else: what a compiler does with an equation, what it
costs, what may be done to it. Planner, passes and interpreters ask `table.traits(eqn.primitive)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from xform._jax import JaxprEqn
from xform.reach import EACH, MOVED, Reach

Count = Callable[[JaxprEqn], float]


def none(eqn: JaxprEqn) -> float:
    """The count of what takes no FLOPs, or passes over no bytes."""
    return 0.0


@dataclasses.dataclass(frozen=True)
class Traits:
    """What is known of a primitive besides its derivative.

    Attributes:
      fusion: what XLA fuses it as with the equations around it: an operation on elements, a
        movement of data (no FLOPs), or a reduction; "" where it is a kernel of its own.
      view: its result is the elements of its operand in another shape, or repeated: nobody needs to
        save it beside the operand.
      identity: its result is its operand, which only bears a name, a place or a mark from there on.
      pools: takes what stands in each of many windows to one element.
      dear: takes so long for each element that XLA does not repeat it in every reader.
      pure: one like it may stand for it. Not so of what keeps values apart for the compiler.
      foldable: may be run while a program is made; without a word, what is no call.
      random: draws random numbers, or makes keys. Run again only where a policy keeps what it names
        and nothing else.
      collective: what the devices of a mesh say to each other. Likewise.
      foreign: a kernel, a callback, a transfer: the compiler does not see into it. Likewise.
      call: of a call, the parameter that holds what is called.
      calls: what a call means besides its body: nothing, a "custom" derivative, a "region" of
        rematerialization, a "mark" of how it runs.
      flops: counts its FLOPs; None: one for each element of the results, of the operand where it is
        a reduction, none where it is a movement.
      bytes: counts the bytes passed over when it is run again; None: those of the results, of the
        operands where it is a reduction.
      lowered: makes the `Program` that compilers for CPUs and GPUs are given in its place, or None
        where it is not known; None: it is one of their operations, or they do not see into it.
      reach: on which elements of the operands an element of the result depends; None: nothing is
        known but what the derivative says.
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
        """Whether it is run while a program is made, if its inputs are known; no call is."""
        return self.foldable and not (self.call or self.calls)

    @property
    def fusible(self) -> bool:
        """Whether XLA fuses it with what reads its result."""
        return bool(self.fusion)

    @property
    def repeatable(self) -> bool:
        """Whether it may be run again without a policy that says so."""
        return not (self.random or self.collective or self.foreign)

    @property
    def named(self) -> list[str]:
        """The traits that differ from those of a primitive of which nothing is known, as words."""
        usual = Traits()
        words: list[str] = [self.fusion] if self.fusion else []
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value == getattr(usual, field.name) or field.name == "reach":
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
# Moved nowhere: a conversion.
CONVERSION = Traits("movement", reach=EACH)
REDUCTION = Traits("reduction")
# Neither FLOPs nor a loop over elements.
MARK = Traits(identity=True, flops=none, reach=EACH)
UNFUSED = Traits(flops=none)
RANDOM = Traits(random=True)
COLLECTIVE = Traits(collective=True)
EXCHANGE = Traits(collective=True, flops=none)
FOREIGN = Traits(foreign=True, foldable=False)
