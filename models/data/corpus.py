"""The training data of a language model: one or more weighted texts, split into two parts.

`load_corpus` makes a `Corpus`. A row is `window + 1` consecutive tokens: the first `window` are the
model's input, and the last `window` are its targets. (`window` is the model's context length.)
"""

from __future__ import annotations

import dataclasses
import functools
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

from models import program
from models.data.batches import ALONE, Share, Source, batches, mixed, spread
from models.data.documents import COLUMN, is_plain
from models.data.files import STANDARD_LIBRARY, files_of, readable
from models.data.prepare import VALIDATION
from models.data.rows import Rows, Windows, count_targets
from models.data.shards import PARTS, Prepared, Stream, is_prepared
from models.data.sources import prepared, weighted
from models.errors import InputError
from models.machine import machine_memory
from models.zigzag import zigzag_blocks

# The largest x for which exp(x) does not overflow.
LARGEST_EXPONENT = math.log(sys.float_info.max)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokenized text for training and validation.

    Attributes:
      name: the name of the corpus in error messages.
      parts: for "train" and "validation", a function from the window size to a list of
        random-access sources of rows `[window + 1]`, one source for each text.
      weights: the proportion of each text in the training batches.
      token_bytes: bytes of text for each token, float64 `[vocab]`.
      dtype: dtype of the rows: uint8 for plain bytes, int32 for tokens of documents, in which the
        first token of a document is marked (see `Rows`).
      tokenizer_json: the content of `tokenizer.json`; None if tokens are bytes.
      fingerprint: a hash that identifies the content.
    """

    name: str
    parts: dict[str, Callable[[int], list[Any]]]
    weights: Sequence[float]
    token_bytes: np.ndarray
    dtype: Any
    tokenizer_json: bytes | None
    fingerprint: str

    @property
    def vocab(self) -> int:
        """Size of the vocabulary; for plain bytes, the largest byte that occurs plus one."""
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
        devices: int = 1,
    ) -> grain.DatasetIterator[Any]:
        """Iterate without end over tokens `[slices, batch, window + 1]`; see `batches.batches`.

        If several `devices` share each row, it is cut into blocks (`models.zigzag`).
        """
        rows = mixed(self.rows("train", window), self.weights, seed)
        whole: Source = rows.map(functools.partial(zigzag_blocks, devices=devices))
        return batches(whole, batch=batch, slices=slices, share=share, sharding=sharding)

    def validation(
        self, *, window: int, batch: int, windows: int, devices: int = 1
    ) -> list[np.ndarray]:
        """Return up to `windows` rows of the validation part, in batches `[<= batch, window + 1]`.

        All batches have the same size. Each text contributes in proportion to its weight, with
        rows that are evenly spaced over it. If several `devices` share each row, it is cut into
        blocks (`models.zigzag`).
        """
        sources = self.rows("validation", window)
        total = sum(self.weights)
        counts = [max(1, round(windows * weight / total)) for weight in self.weights]
        rows = [
            zigzag_blocks(row, devices)
            for source, count in zip(sources, counts, strict=True)
            for (row,) in spread(source, batch=1, count=count)
        ]
        return spread(rows, batch=batch, count=len(rows))

    def bits_per_byte(self, losses: Sequence[float], batches: Sequence[np.ndarray]) -> float:
        """Compute the loss in bits per byte of predicted text.

        Args:
          losses: the mean loss of each batch, in nats per token.
          batches: the batches.
        """
        nats, _, text_bytes = self._totals(losses, batches)
        return nats / math.log(2) / text_bytes

    def perplexity(self, losses: Sequence[float], batches: Sequence[np.ndarray]) -> float:
        """Compute the perplexity per token, from the arguments of `bits_per_byte`.

        Unlike bits per byte, perplexities of different tokenizers cannot be compared.
        """
        nats, tokens, _ = self._totals(losses, batches)
        return math.exp(nats / tokens) if nats / tokens < LARGEST_EXPONENT else math.inf

    def _totals(
        self, losses: Sequence[float], batches: Sequence[np.ndarray]
    ) -> tuple[float, float, float]:
        """Return the total loss in nats, and the numbers of predicted tokens and bytes."""
        counts = [count_targets(batch, self.token_bytes) for batch in batches]
        nats = math.fsum(loss * tokens for loss, (tokens, _) in zip(losses, counts, strict=True))
        return nats, sum(tokens for tokens, _ in counts), sum(size for _, size in counts)

    def rows(self, part: str, window: int) -> list[Any]:
        """Return the rows of a part, one source per text; `InputError` if a text has no row."""
        sources = self.parts[part](window)
        for source in sources:
            if not len(source):
                raise InputError(
                    f"{self.name} has too few tokens in its {part} part for a window of {window}:"
                    " add text, or lower --context"
                )
        return sources


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
    """Load a corpus. Text is tokenized first, if it was not before.

    Plain text files without a tokenizer are read into memory as bytes. All other text is tokenized
    once into prepared folders under `work`, and these are mapped into memory. A path in `data` may
    also be a prepared folder.

    Args:
      data: paths, each optionally followed by its weight, as in `books=0.7`. An empty sequence
        means the source files of the Python standard library.
      window: context length of the model, in tokens.
      vocab: size of the model's vocabulary.
      tokenizer: "bytes", "bpe:8192" to train one, or the path of a `tokenizer.json`. None means the
        tokenizer of the prepared folders, or bytes.
      column: the column of tables, or the field of JSON lines, that holds the text.
      work: the folder in which prepared folders are made.
      without: a folder whose files are skipped, such as the folder of the run.

    Raises:
      InputError: a text cannot be used, is too short, is too large for this machine's memory, or
        has more distinct tokens than the model.
    """
    sources = [weighted(text) for text in data] or [(None, 1.0)]
    paths, weights = [path for path, _ in sources], [weight for _, weight in sources]
    name = " and ".join(str(path or STANDARD_LIBRARY) for path in paths)
    if rows_dtype(data, tokenizer, without) == np.uint8:
        corpus = _from_bytes(paths[0], name, without)
    else:
        folders = prepared(paths, tokenizer, column, work, without)
        corpus = _from_folders(name, folders, weights)
    if corpus.vocab > vocab:
        raise InputError(
            f"{name} has a vocabulary of {corpus.vocab} tokens, but the model has {vocab}: use"
            f" --vocab {corpus.vocab}"
        )
    for part in corpus.parts:
        corpus.rows(part, window)
    return corpus


def rows_dtype(data: Sequence[str], tokenizer: str | None, without: Path | None = None) -> Any:
    """Return the `Corpus.dtype` that `load_corpus` will give, without reading any text."""
    if len(data) > 1 or tokenizer not in (None, "bytes"):
        return np.int32
    path = weighted(data[0])[0] if data else None
    # The standard library is plain text. Listing its files to find that out would take time.
    plain = path is None or (not is_prepared(path) and is_plain(path, without))
    return np.uint8 if plain else np.int32


def _from_bytes(path: Path | None, name: str, without: Path | None) -> Corpus:
    """Make a corpus of the concatenated bytes of files. Their last bytes are for validation."""
    files = files_of(path, without)
    with readable():
        if (size := sum(file.stat().st_size for file in files)) > machine_memory() // 2:
            raise InputError(
                f"{name} has {size} bytes, more than half of this machine's memory of"
                f" {machine_memory()}: tokenize it first with: {program.NAME} data"
            )
        text = b"".join(file.read_bytes() for file in files)
    if not text:
        raise InputError(f"{name} is empty: name files that contain text")
    array = np.frombuffer(text, np.uint8)

    def part(window: int, is_validation: bool) -> list[Any]:
        size = max(window + 1, int(len(text) * VALIDATION))
        if len(text) < 2 * (window + 1):
            raise InputError(
                f"{name} has {len(text)} bytes, and a window of {window} needs at least"
                f" {2 * (window + 1)}: add text, or lower --context"
            )
        return [Windows(array[-size:] if is_validation else array[:-size], window)]

    parts = {"train": lambda w: part(w, False), "validation": lambda w: part(w, True)}
    fingerprint = hashlib.sha256(text).hexdigest()[:16]
    token_bytes = np.ones(int(array.max()) + 1)
    return Corpus(name, parts, [1.0], token_bytes, np.uint8, None, fingerprint)


def _from_folders(name: str, folders: Sequence[Prepared], weights: Sequence[float]) -> Corpus:
    """Make a corpus of the documents in prepared folders."""
    first, size = folders[0], len(folders[0].token_bytes)
    for other in folders[1:]:
        if (other.tokenizer_json, len(other.token_bytes)) != (first.tokenizer_json, size):
            raise InputError(
                f"{other.name} and {first.name} have different tokenizers: prepare both with the"
                " same one"
            )
    identity = [
        (folder.fingerprint, weight) for folder, weight in zip(folders, weights, strict=True)
    ]
    return Corpus(
        name,
        {
            part: lambda w, part=part: [Rows(Stream(folder.parts[part]), w) for folder in folders]
            for part in PARTS
        },
        weights,
        first.token_bytes,
        np.int32,
        first.tokenizer_json,
        hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16],
    )
