"""JAX's marker types, which stand for arguments and cotangents of a pullback."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax

wishes: Any = vars(jax)["ad"]  # GradValue, GradRef, DontWant and DidntWant
_theirs: Any = sys.modules[wishes.DontWant.__module__]
NotNeeded: Any = _theirs.NotNeeded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _NotSaveable:
    """Stands for an argument that a pullback reads and that the user must restore first."""


NotSaveable: Any = getattr(_theirs, "NotSaveable", _NotSaveable)  # since 0.12
