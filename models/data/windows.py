"""Windows of bytes for language models: read, split, shuffled, and resumable at any step."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import grain
import numpy as np

from models.errors import InputError
from models.machine import machine_memory

VALIDATION_FRACTION = 0.05
FOR_EVER = 2**60
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes `[N]` of text in two parts, and what tells one corpus from another."""

    name: str
    train: np.ndarray
    validation: np.ndarray
    fingerprint: str


def load_corpus(path: Path | None, window: int, without: Path | None = None) -> Corpus:
    """Read a corpus that has room for a window of `window + 1` bytes in either part.

    Files come in the order of a hash of their names. That order is the same on every run, and the
    end of it, which validation takes, is a fair sample of the files.

    Args:
      path: a file, a folder of which every file is read, or `None` for the sources of the Python
        standard library on this machine.
      window: tokens that a model reads at once.
      without: a folder whose files are not read, such as that of the run itself.

    Raises:
      InputError: missing, empty, unreadable, too short, or too large for this machine.
    """
    name = "the Python standard library" if path is None else str(path)
    try:
        root, files = _files(path, without)
        if (size := sum(file.stat().st_size for file in files)) > machine_memory() // 2:
            raise InputError(
                f"{name} has {size} bytes, and this machine memory for {machine_memory()}"
            )
        text = _read(root, files)
    except FileNotFoundError as error:
        raise InputError(f"no such file or folder: {error.filename}") from None
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from None
    if not text:
        raise InputError(f"{name} holds no bytes to train on")
    needed = 2 * (window + 1)
    if len(text) < needed:
        raise InputError(
            f"{name} has {len(text)} bytes, and windows of {window} need at least {needed}:"
            " give more text or a smaller --context"
        )
    held = max(window + 1, int(len(text) * VALIDATION_FRACTION))
    array = np.frombuffer(text, dtype=np.uint8)
    return Corpus(name, array[:-held], array[-held:], hashlib.sha256(text).hexdigest()[:16])


def _files(path: Path | None, without: Path | None) -> tuple[Path, list[Path]]:
    """A folder, and the files in it that are read."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return root, [f for f in root.rglob("*.py") if not SKIPPED_FOLDERS & set(f.parent.parts)]
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        apart = None if without is None else without.resolve()
        files = [f for f in path.rglob("*") if f.is_file()]
        return path, [f for f in files if apart is None or apart not in f.resolve().parents]
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is neither a file nor a folder")
    return path.parent, [path]


def _read(root: Path, files: Sequence[Path]) -> bytes:
    def place(file: Path) -> str:
        return hashlib.sha256(os.fsencode(file.relative_to(root).as_posix())).hexdigest()

    return b"".join(file.read_bytes() for file in sorted(files, key=place))


class Windows:
    """Consecutive windows of a text as a random-access source; neighbours share one byte."""

    def __init__(self, text: np.ndarray, window: int) -> None:
        self.text = text
        self.window = window

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.window

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.window
        return self.text[start : start + self.window + 1]


def train_batches(
    text: np.ndarray, *, window: int, batch: int, seed: int
) -> grain.DatasetIterator[np.ndarray]:
    """Iterate for ever over shuffled uint8 batches `[batch, window + 1]`, reshuffled each epoch.

    Batch number i depends on (text, window, batch, seed, i) alone. `get_state` and `set_state`
    of the iterator make a run resumable.
    """
    source = Windows(text, window)
    windows = grain.MapDataset.source(source).seed(seed).shuffle()
    # Not `repeat()`: that is for as many as Python's largest length, and batches of one are one
    # more than that.
    batches = windows.repeat(FOR_EVER // len(source)).batch(batch)
    # One thread reads ahead: slicing bytes in memory is too little work to share.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def validation_batches(
    text: np.ndarray, *, window: int, batch: int, windows: int
) -> list[np.ndarray]:
    """Up to `windows` windows spread evenly over `text`, as equal batches `[<= batch, window + 1]`.

    What does not fill a batch is left out, so that all have one shape.
    """
    source = Windows(text, window)
    count = min(windows, len(source))
    size = min(batch, count)
    picked = np.linspace(0, len(source) - 1, count).astype(int)
    stacked = np.stack([source[int(i)] for i in picked])
    return [stacked[i : i + size] for i in range(0, count - size + 1, size)]
