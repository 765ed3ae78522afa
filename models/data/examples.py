"""The training data of a model of pictures or series: elements split into two parts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import jax
import numpy as np

from models.data.batches import Source

# Number of array elements that are hashed at once.
_HASHED_ELEMENTS = 2**24


@dataclasses.dataclass(frozen=True)
class Examples:
    """Elements for training and validation, all with the same shapes.

    Attributes:
      name: the name of the data in error messages.
      parts: the sources "train" and "validation".
      content: returns the arrays and strings that define the data, to detect changes. They are read
        when it is called.
      classes: number of classes of the labels; 0 without labels.
    """

    name: str
    parts: dict[str, Source]
    content: Callable[[], Iterable[np.ndarray | str]]
    classes: int = 0

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the content. Computing it reads all of the content."""
        digest = hashlib.sha256()
        for part in self.content():
            if isinstance(part, str):
                digest.update(part.encode())
                continue
            digest.update(f"{part.dtype.str} {part.shape}".encode())
            rows = max(1, _HASHED_ELEMENTS * len(part) // max(part.size, 1))
            for start in range(0, len(part), rows):
                digest.update(np.ascontiguousarray(part[start : start + rows]).data)
        return digest.hexdigest()[:16]

    def element(self, part: str = "train") -> Any:
        """Return the type of a part's elements, as a pytree of `jax.ShapeDtypeStruct`."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.parts[part][0])
