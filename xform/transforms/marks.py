"""Marker types of JAX for the arguments and the results of a pullback.

- `markers.GradValue`, `markers.DontWant`: what the caller of `pull.with_refs` wants for an
  argument. `markers.GradRef`, `markers.DidntWant`: what the call returns in place of a cotangent.
- `NotNeeded`, `NotSaveable`: stand in `pull.args_res` for an argument that the pullback does not
  read, and for one that it reads and the caller must restore.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax

markers: Any = vars(jax)["ad"]
_module: Any = sys.modules[markers.DontWant.__module__]
NotNeeded: Any = _module.NotNeeded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _NotSaveable:
    """The `NotSaveable` of JAX, for versions before 0.12, which have none."""


NotSaveable: Any = getattr(_module, "NotSaveable", _NotSaveable)
