"""Tokenize text once into a folder, for use in many runs.

The folder holds the tokens in files (shards, see `shards.py`). It appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from models.data.documents import COLUMN, Document, documents
from models.data.files import STANDARD_LIBRARY, readable
from models.data.shards import MANIFEST, PARTS, Writer, write_manifest
from models.data.split import Split, split
from models.data.tokenizer import Tokenizer, tokenizer_of
from models.errors import InputError

VALIDATION = 0.05  # the default share of documents for validation
SHARD = 2**26  # the default number of tokens in a shard
_ENCODED_BYTES = 2**22  # bytes of documents that are tokenized together


@dataclasses.dataclass(frozen=True)
class Counts:
    """The size of a part, "train" or "validation", of a prepared folder."""

    documents: int
    tokens: int
    bytes: int


def prepare(
    source: Path | None,
    out: Path,
    *,
    tokenizer: str | Tokenizer = "bytes",
    column: str = COLUMN,
    validation_share: float = VALIDATION,
    shard_tokens: int = SHARD,
    without: Path | None = None,
) -> dict[str, Counts]:
    """Write the tokens of all documents of `source` to a new folder `out`.

    The result is deterministic: the same documents and arguments give the same bytes. The folder
    appears only when it is complete.

    Args:
      source: a file or folder of text, JSON lines or tables; None for the source files of Python's
        standard library.
      out: the folder to create.
      tokenizer: a tokenizer, or "bytes", "bpe:8192" or the path of a `tokenizer.json`. It is
        trained on the part `train` only.
      column: the column of tables, or the field of JSON lines, that holds the text.
      validation_share: the share of documents for validation.
      shard_tokens: approximate number of tokens in a shard.
      without: a folder whose files are skipped.

    Returns:
      The size of each part.

    Raises:
      InputError: the text cannot be used, or `out` exists or cannot be written.
    """
    with readable():
        exists = out.exists()
    if exists:
        raise InputError(f"{out} already exists: choose another folder, or remove it")
    if isinstance(tokenizer, str):
        training = training_documents(source, column, without, validation_share)
        tokenizer = tokenizer_of(tokenizer, training)
    with _complete_or_absent(out) as folder:
        parts = split(documents(source, column, without), validation_share)
        return _write(folder, parts, tokenizer, shard_tokens, str(source or STANDARD_LIBRARY))


def training_documents(
    source: Path | None, column: str, without: Path | None, validation_share: float = VALIDATION
) -> Iterator[Document]:
    """Iterate over the documents of the part `train`, on which a tokenizer is trained."""
    parts = split(documents(source, column, without), validation_share)
    return (document for part, document in parts if part == "train")


def _write(folder: Path, parts: Iterator[Split], tokenizer: Tokenizer, shard_tokens: int, name: str
           ) -> dict[str, Counts]:  # fmt: skip
    """Tokenize pairs of a part and a document into a folder, and return the size of each part.

    `name` names the text in messages.
    """
    dtype = np.min_scalar_type(tokenizer.vocab - 1)
    writers = {part: Writer(folder, part, dtype, shard_tokens) for part in PARTS}
    sizes = tokenizer.token_bytes
    for batch in _batches(parts):
        encoded = tokenizer.encode([document for _, document in batch])
        for (part, document), tokens in zip(batch, encoded, strict=True):
            if sizes is not None and sizes[tokens].sum() != len(document.content):
                sizes = None  # the tokenizer normalizes text, so bytes per token are not exact
            if len(tokens):
                writers[part].add(tokens, len(document.content))
    for part, writer in writers.items():
        if not writer.tokens:
            raise InputError(f"{name} has no text for its {part} part: add text")
        writer.flush()
    counts = {p: Counts(w.documents, w.tokens, w.bytes) for p, w in writers.items()}
    if sizes is None:
        tokens = sum(count.tokens for count in counts.values())
        text_bytes = sum(count.bytes for count in counts.values())
        sizes = np.full(tokenizer.vocab, text_bytes / tokens)
    manifest = {
        "tokenizer": tokenizer.name,
        "end": tokenizer.end,
        "counts": {part: dataclasses.asdict(count) for part, count in counts.items()},
        "parts": {part: writer.listed for part, writer in writers.items()},
    }
    write_manifest(folder, manifest, sizes, tokenizer.to_json())
    return counts


def _batches(parts: Iterator[Split]) -> Iterator[list[Split]]:
    """Group documents into lists of about `_ENCODED_BYTES` bytes."""
    batch: list[Split] = []
    size = 0
    for part, document in parts:
        batch.append((part, document))
        size += len(document.content)
        if size >= _ENCODED_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


@contextlib.contextmanager
def _complete_or_absent(out: Path) -> Iterator[Path]:
    """Make a temporary folder that is renamed to `out` on success and deleted on failure."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from None
    try:
        yield folder
        folder.chmod(0o755)
        folder.rename(out)
    except OSError as error:
        # Another process may have prepared the same folder in the meantime.
        if not _same_bytes(folder / MANIFEST, out / MANIFEST):
            raise InputError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _same_bytes(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()
