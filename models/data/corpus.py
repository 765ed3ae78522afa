"""What a language model is trained on: one text, or several in proportions, in two parts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from models.data.batches import ALONE, Share, Source, batches, mixed, spread
from models.data.documents import COLUMN, is_plain
from models.data.files import STANDARD_LIBRARY, files_of, readable
from models.data.prepare import VALIDATION
from models.data.rows import Rows, Windows, judged
from models.data.shards import PARTS, Prepared, Stream, is_prepared
from models.data.sources import prepared, weighted
from models.errors import InputError
from models.machine import machine_memory

LARGEST_EXPONENT = math.log(sys.float_info.max)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens in two parts, and what tells one corpus from another.

    Attributes:
      name: what an error calls it.
      parts: of "train" and "validation", a function from a window to random-access sources of rows
        `[window + 1]`, one for each text.
      weights: the share of each text in what is trained on.
      token_bytes: bytes of text that a token stands for, float64 `[vocab]`.
      dtype: of rows: uint8 for plain bytes; int32 where marks say that documents begin, see `Rows`.
      words: the content of `tokenizer.json`; None if tokens are bytes.
      fingerprint: what tells one corpus from another.
    """

    name: str
    parts: dict[str, Callable[[int], list[Any]]]
    weights: Sequence[float]
    token_bytes: np.ndarray
    dtype: Any
    words: bytes | None
    fingerprint: str

    @property
    def vocab(self) -> int:
        """How many tokens there are; of plain bytes, up to the largest that occurs."""
        return len(self.token_bytes)

    def batches(
        self,
        *,
        window: int,
        batch: int,
        slices: int = 1,
        seed: int = 0,
        share: Share = ALONE,
        sharding: jax.sharding.Sharding | None = None,
    ) -> grain.DatasetIterator[Any]:
        """Iterate for ever over tokens `[slices, batch, window + 1]`, as `batches.batches` does."""
        whole: Source = mixed(self.rows("train", window), self.weights, seed)
        return batches(whole, batch=batch, slices=slices, share=share, sharding=sharding)

    def validation(self, *, window: int, batch: int, windows: int) -> list[np.ndarray]:
        """Up to `windows` rows of the held part, as equal batches `[<= batch, window + 1]`.

        Each text has its share of them, spread evenly over it.
        """
        sources = self.rows("validation", window)
        total = sum(self.weights)
        counts = [max(1, round(windows * weight / total)) for weight in self.weights]
        some = [
            row
            for source, count in zip(sources, counts, strict=True)
            for (row,) in spread(source, batch=1, count=count)
        ]
        return spread(some, batch=batch, count=len(some))

    def bits_per_byte(self, losses: Sequence[float], some: Sequence[np.ndarray]) -> float:
        """Bits for each byte of text that is predicted, by the mean losses of batches, in nats."""
        nats, _, size = self._judged(losses, some)
        return nats / math.log(2) / size

    def perplexity(self, losses: Sequence[float], some: Sequence[np.ndarray]) -> float:
        """Of a token, by the same; unlike bits per byte, it is of this tokenizer."""
        nats, tokens, _ = self._judged(losses, some)
        return math.exp(nats / tokens) if nats / tokens < LARGEST_EXPONENT else math.inf

    def _judged(
        self, losses: Sequence[float], some: Sequence[np.ndarray]
    ) -> tuple[float, float, float]:
        """All nats, and the tokens and bytes that are predicted."""
        counts = [judged(batch, self.token_bytes) for batch in some]
        nats = math.fsum(loss * tokens for loss, (tokens, _) in zip(losses, counts, strict=True))
        return nats, sum(tokens for tokens, _ in counts), sum(size for _, size in counts)

    def rows(self, part: str, window: int) -> list[Any]:
        """The rows of a part, for each text; `InputError` if there are none."""
        found = self.parts[part](window)
        for source in found:
            if not len(source):
                raise InputError(
                    f"{self.name} has too few tokens for {part} in windows of {window}: give more"
                    " text or a smaller --context"
                )
        return found


def load_corpus(
    data: Sequence[str],
    window: int,
    *,
    vocab: int,
    tokenizer: str | None = None,
    column: str = COLUMN,
    work: Path,
    without: Path | None = None,
) -> Corpus:
    """Read, or prepare and map into memory, what a model is trained on.

    Text of plain files with no tokenizer is bytes, in memory. All else is in prepared folders:
    those that are given, and others that are made under `work`, once, of the texts that are given.

    Args:
      data: paths, each with `=0.7` after it if it has a weight; nothing for the sources of the
        Python standard library.
      window: tokens that a model reads at once.
      vocab: tokens that it has.
      tokenizer: as for `tokenizer_of`; None for that of a prepared folder, or bytes.
      column: of tables and JSON, where the text is.
      work: where folders are prepared.
      without: a folder whose files are not read, such as that of the run itself.

    Raises:
      InputError: a text cannot be used, is too short, too large for this machine, or has more
        tokens than the model.
    """
    sources = [weighted(one) for one in data] or [(None, 1.0)]
    paths, weights = [path for path, _ in sources], [weight for _, weight in sources]
    name = " and ".join(str(path or STANDARD_LIBRARY) for path in paths)
    if rows_dtype(data, tokenizer, without) == np.uint8:
        corpus = _plain(paths[0], name, without)
    else:
        folders = prepared(paths, tokenizer, column, work, without)
        corpus = _of_folders(name, folders, weights)
    if corpus.vocab > vocab:
        raise InputError(
            f"{name} has {corpus.vocab} tokens, and the model {vocab}: give --vocab {corpus.vocab}"
        )
    for part in corpus.parts:
        corpus.rows(part, window)
    return corpus


def rows_dtype(data: Sequence[str], tokenizer: str | None, without: Path | None = None) -> Any:
    """What `Corpus.dtype` will be: it is known before anything is read."""
    if len(data) > 1 or tokenizer not in (None, "bytes"):
        return np.int32
    path = weighted(data[0])[0] if data else None
    # The standard library is plain, and takes time to walk through.
    plain = path is None or (not is_prepared(path) and is_plain(path, without))
    return np.uint8 if plain else np.int32


def _plain(path: Path | None, name: str, without: Path | None) -> Corpus:
    """The bytes of files one after another; the end of them is for validation."""
    files = files_of(path, without)
    with readable():
        if (size := sum(file.stat().st_size for file in files)) > machine_memory() // 2:
            raise InputError(
                f"{name} has {size} bytes, and this machine memory for {machine_memory()}: prepare"
                " it first, by: python -m models data"
            )
        text = b"".join(file.read_bytes() for file in files)
    if not text:
        raise InputError(f"{name} holds no bytes to train on")
    array = np.frombuffer(text, np.uint8)

    def part(window: int, held: bool) -> list[Any]:
        size = max(window + 1, int(len(text) * VALIDATION))
        if len(text) < 2 * (window + 1):
            raise InputError(
                f"{name} has {len(text)} bytes, and windows of {window} need at least"
                f" {2 * (window + 1)}: give more text or a smaller --context"
            )
        return [Windows(array[-size:] if held else array[:-size], window)]

    parts = {"train": lambda w: part(w, False), "validation": lambda w: part(w, True)}
    mark = hashlib.sha256(text).hexdigest()[:16]
    return Corpus(name, parts, [1.0], np.ones(int(array.max()) + 1), np.uint8, None, mark)


def _of_folders(name: str, folders: Sequence[Prepared], weights: Sequence[float]) -> Corpus:
    """Documents of prepared folders."""
    first, size = folders[0], len(folders[0].token_bytes)
    for other in folders[1:]:
        if (other.words, len(other.token_bytes)) != (first.words, size):
            raise InputError(f"{other.name} and {first.name} are of different tokenizers")
    marks = [(folder.fingerprint, weight) for folder, weight in zip(folders, weights, strict=True)]
    return Corpus(
        name,
        {
            part: lambda w, part=part: [Rows(Stream(folder.parts[part]), w) for folder in folders]
            for part in PARTS
        },
        weights,
        first.token_bytes,
        np.int32,
        first.words,
        hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:16],
    )
