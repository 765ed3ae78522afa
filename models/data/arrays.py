"""Arrays of NumPy on disk, mapped into memory, and the parts of what is numbered."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import MAGIC_PREFIX

from models.data.batches import Source
from models.data.files import readable
from models.errors import InputError

# How a pickle begins.
_PICKLE = b"\x80"


def mapped(path: Path) -> np.ndarray:
    """The array of a `.npy` file; nothing of it is read before it is asked for.

    Raises:
      InputError: it is no such file, was cut, or holds Python objects.
    """
    with readable():
        if not path.is_file() and path.exists():
            raise InputError(f"{path} is no file")
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            reason = str(error).splitlines()[0]
            if isinstance(error, EOFError) or "allow_pickle" in reason:  # no option of a command
                reason = _foreign(path)
            raise InputError(f"{path} is no array of NumPy that can be read: {reason}") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"{path} holds several arrays: give one .npy file for each")
    return array


def _foreign(path: Path) -> str:
    """Describe a file that NumPy would read as a pickle."""
    with path.open("rb") as file:
        head = file.read(len(MAGIC_PREFIX))
    if head == MAGIC_PREFIX or head[:1] == _PICKLE:
        return "it holds Python objects, so save it with a dtype of numbers"
    return "it is no .npy file" if head else "it is empty"


class Chosen:
    """Some elements of a source, in this order."""

    def __init__(self, source: Source, numbers: Sequence[int] | np.ndarray) -> None:
        self._source, self._numbers = source, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._source[int(self._numbers[index])]


def halves(source: Source, fraction: float, seed: int = 0) -> dict[str, Source]:
    """The parts "train" and "validation" of a source, the latter a share drawn by a seed.

    Raises:
      InputError: there are fewer than two elements.
    """
    if len(source) < 2:
        raise InputError(f"there must be two elements to split, and there are {len(source)}")
    order = np.random.default_rng(seed).permutation(len(source))
    held = min(len(source) - 1, max(1, int(len(source) * fraction)))
    return {"train": Chosen(source, order[held:]), "validation": Chosen(source, order[:held])}
