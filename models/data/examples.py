"""What a model of pictures or of series is trained on: elements in two parts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import jax
import numpy as np

from models.data.batches import Source

# Elements of an array that are hashed at once.
_SOME = 2**24


@dataclasses.dataclass(frozen=True)
class Examples:
    """Elements of one form in two parts, and what tells such data from another.

    Attributes:
      name: what an error calls it.
      parts: "train" and "validation": sources of elements.
      content: what the elements are made of, to tell whether it has changed: arrays and texts. It
        is read when it is asked for.
      classes: how many classes the labels are of; 0 where there are none.
    """

    name: str
    parts: dict[str, Source]
    content: Callable[[], Iterable[np.ndarray | str]]
    classes: int = 0

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content."""
        mark = hashlib.sha256()
        for part in self.content():
            if isinstance(part, str):
                mark.update(part.encode())
                continue
            mark.update(f"{part.dtype.str} {part.shape}".encode())
            rows = max(1, _SOME * len(part) // max(part.size, 1))
            for start in range(0, len(part), rows):
                mark.update(np.ascontiguousarray(part[start : start + rows]).data)
        return mark.hexdigest()[:16]

    def element(self, part: str = "train") -> Any:
        """The types of an element of a part."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.parts[part][0])
