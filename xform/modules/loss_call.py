"""`LossCall`: a loss, its arguments, and the options of the function that gets it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class LossCall:
    """A loss, its arguments, and the options of the function that gets it.

    Attributes:
      f: the loss.
      args: its arguments.
      argnums: positions of the differentiated arguments; None for all. For a loss of NNX modules, a
        position may be an `nnx.DiffState`.
      has_aux: whether the loss returns a pair `(output, auxiliary)`.
      donate: positions of the donated arguments.
    """

    f: Callable[..., Any]
    args: Sequence[Tree]
    argnums: Any
    has_aux: bool = False
    donate: tuple[int, ...] = ()
