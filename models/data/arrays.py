"""NumPy arrays mapped from disk, and the random split of a source into two parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import MAGIC_PREFIX

from models.data.batches import Source
from models.data.files import readable
from models.errors import InputError

# The first byte of a pickle, which holds Python objects.
_PICKLE = b"\x80"


def mapped(path: Path) -> np.ndarray:
    """Map the array of a `.npy` file into memory. Elements are read from disk when they are used.

    Raises:
      InputError: the file is missing, is not a `.npy` file, is truncated, or holds Python objects.
    """
    with readable():
        if not path.is_file() and path.exists():
            raise InputError(f"{path} is not a file: name a .npy file")
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            reason = str(error).splitlines()[0]
            # NumPy's message names `allow_pickle`, which is not an option of our commands.
            if isinstance(error, EOFError) or "allow_pickle" in reason:
                reason = _why_not_numeric(path)
            raise InputError(f"{path} cannot be read as a NumPy array: {reason}") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path} holds several arrays: save each in its own .npy file")
    return array


def _why_not_numeric(path: Path) -> str:
    """Return the reason why a file that NumPy takes for a pickle cannot be read."""
    with path.open("rb") as file:
        head = file.read(len(MAGIC_PREFIX))
    if head == MAGIC_PREFIX or head[:1] == _PICKLE:
        return "it holds Python objects: save it with a numeric dtype"
    return "it is not a .npy file" if head else "it is empty"


class Subset:
    """The elements of a source at `indices`, in that order."""

    def __init__(self, source: Source, indices: Sequence[int] | np.ndarray) -> None:
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._source[int(self._indices[index])]


def halves(source: Source, fraction: float, seed: int = 0) -> dict[str, Source]:
    """Split a source at random into the parts "train" and "validation".

    Args:
      source: the elements, at least two.
      fraction: the share of elements for validation; each part gets at least one element.
      seed: the seed of the random split.

    Raises:
      InputError: the source has fewer than two elements.
    """
    if len(source) < 2:
        raise InputError(f"a split needs at least two elements, and there are {len(source)}")
    order = np.random.default_rng(seed).permutation(len(source))
    count = min(len(source) - 1, max(1, int(len(source) * fraction)))
    return {"train": Subset(source, order[count:]), "validation": Subset(source, order[:count])}
