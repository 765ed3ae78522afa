"""Tokenized documents on disk, in files with checksums that are mapped into memory.

A prepared folder, which `prepare.py` makes, has two parts, `train` and `validation`. A part is a
list of shards. A shard is two NumPy files: the tokens of consecutive documents, and the position
where each document ends. `manifest.json` lists the files with their checksums, and has a checksum
of its own. `tokenizer.json` and `token_bytes.npy` (the bytes of text of each token) are beside it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.data.files import readable
from models.errors import InputError

MANIFEST, TOKENIZER, SIZES = "manifest.json", "tokenizer.json", "token_bytes.npy"
PARTS = ("train", "validation")
VERSION = 1  # of the folder's format
_BLOCK = 2**24  # bytes that are read at once


@dataclasses.dataclass(frozen=True)
class Shard:
    """Consecutive documents: `tokens` `[N]`, and the end of each document, int64 `[documents]`."""

    tokens: np.ndarray
    ends: np.ndarray


@dataclasses.dataclass(frozen=True)
class Prepared:
    """An open prepared folder.

    Attributes:
      name: the path of the folder.
      parts: the shards of each part.
      token_bytes: bytes of text for each token, float64 `[vocab]`.
      tokenizer_json: the content of `tokenizer.json`; None if tokens are bytes.
      tokenizer: the name of the tokenizer.
      end: the token that ends a document; None without one.
      fingerprint: a checksum that identifies the content.
    """

    name: str
    parts: dict[str, list[Shard]]
    token_bytes: np.ndarray
    tokenizer_json: bytes | None
    tokenizer: str
    end: int | None
    fingerprint: str


def is_prepared(path: Path | None) -> bool:
    """Return whether a path is a prepared folder."""
    if path is None:
        return False
    with readable():
        return path.is_dir() and (path / MANIFEST).is_file()


class Writer:
    """Writes the shards of one part. A shard is written when it has at least `size` tokens.

    Attributes:
      listed: the files of each shard, with sizes and checksums, for the manifest.
      tokens, documents, bytes: the size of the part so far.
    """

    def __init__(self, folder: Path, part: str, dtype: Any, size: int) -> None:
        self.listed: list[dict[str, Any]] = []
        self.tokens = self.documents = self.bytes = 0
        self._folder, self._part, self._dtype, self._size = folder, part, dtype, size
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0

    def add(self, tokens: np.ndarray, size: int) -> None:
        """Add a document of `size` bytes."""
        self._pending.append(tokens.astype(self._dtype))
        self._pending_tokens += len(tokens)
        self.tokens += len(tokens)
        self.documents += 1
        self.bytes += size
        if self._pending_tokens >= self._size:
            self.flush()

    def flush(self) -> None:
        """Write the documents in memory as a shard."""
        if not self._pending:
            return
        name = f"{self._part}-{len(self.listed):05d}"
        ends = np.cumsum([len(tokens) for tokens in self._pending], dtype=np.int64)
        arrays = {f"{name}.tokens.npy": np.concatenate(self._pending), f"{name}.ends.npy": ends}
        self.listed.append({file: _save(self._folder / file, x) for file, x in arrays.items()})
        self._pending, self._pending_tokens = [], 0


def _save(path: Path, array: np.ndarray) -> dict[str, int]:
    """Write an array to disk, and return its entry in the manifest: bytes and checksum."""
    with path.open("wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "crc32": _crc(path)}


def _crc(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def write_manifest(
    folder: Path, manifest: dict[str, Any], token_bytes: np.ndarray, tokenizer_json: str | None
) -> None:
    """Write the manifest file, and the other files beside the shards. Call it last.

    Args:
      folder: the prepared folder.
      manifest: the entries of the manifest for the shards.
      token_bytes: bytes of text of each token, `[vocab]`.
      tokenizer_json: the content of `tokenizer.json`; None if tokens are bytes.
    """
    sizes = {SIZES: _save(folder / SIZES, token_bytes.astype(np.float64))}
    manifest = {"version": VERSION, "token_bytes": sizes, **manifest}
    if tokenizer_json is not None:
        (folder / TOKENIZER).write_text(tokenizer_json, encoding="utf-8")
        manifest["words"] = zlib.crc32(tokenizer_json.encode())
    text = json.dumps({**manifest, "crc32": _manifest_crc(manifest)}, indent=1)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _manifest_crc(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def open_prepared(folder: Path) -> Prepared:
    """Map a prepared folder into memory. All files are read once to verify their checksums.

    Raises:
      InputError: the folder is damaged, or has another format version.
    """
    with readable():
        manifest = _manifest(folder)
        tokenizer_json = None
        if "words" in manifest:
            tokenizer_json = (folder / TOKENIZER).read_bytes()
            if zlib.crc32(tokenizer_json) != manifest["words"]:
                raise InputError(_damaged(folder / TOKENIZER))
        (token_bytes,) = _arrays(folder, manifest["token_bytes"])
        parts = {
            part: [Shard(*_arrays(folder, files)) for files in manifest["parts"][part]]
            for part in PARTS
        }
    return Prepared(
        str(folder),
        parts,
        token_bytes,
        tokenizer_json,
        manifest["tokenizer"],
        manifest["end"],
        f"{manifest['crc32']:08x}",
    )


def vocabulary(folder: Path) -> int | None:
    """Return the vocabulary size of a prepared folder; None if tokens are bytes.

    The shards are not read.
    """
    with readable():
        manifest = _manifest(folder)
        (token_bytes,) = _arrays(folder, manifest["token_bytes"])
    return len(token_bytes) if "words" in manifest else None


def _manifest(folder: Path) -> dict[str, Any]:
    """Read and verify the manifest."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        crc = manifest.pop("crc32")
        is_intact = crc == _manifest_crc(manifest)
    except (ValueError, AttributeError, KeyError, TypeError):
        raise InputError(_damaged(path)) from None
    if not is_intact:
        raise InputError(_damaged(path))
    if manifest["version"] != VERSION:
        raise InputError(f"{path} has format version {manifest['version']}, but this program reads"
                         f" version {VERSION}: prepare the text again")  # fmt: skip
    return {**manifest, "crc32": crc}


def _arrays(folder: Path, files: dict[str, dict[str, int]]) -> list[np.ndarray]:
    """Map files into memory after verifying their sizes and checksums."""
    for name, entry in files.items():
        path = folder / name
        # The size is compared first, so that a truncated file is not read.
        if path.stat().st_size != entry["bytes"] or _crc(path) != entry["crc32"]:
            raise InputError(_damaged(path))
    return [np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in files]


def _damaged(path: Path) -> str:
    return f"{path} is damaged: its content has changed; prepare the text again"


class Stream:
    """The tokens of several shards as one sequence, with the beginnings of documents."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._stops = np.cumsum([len(shard.tokens) for shard in shards])

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens `[stop - start]`, and a mask of the tokens that begin a document."""
        pieces = list(self._pieces(start, stop))
        tokens = np.concatenate([shard.tokens[a:b] for shard, a, b in pieces])
        first = np.concatenate([_begins(shard.ends, a, b) for shard, a, b in pieces])
        return tokens, first

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Shard, int, int]]:
        """Iterate over the shards from token `start` to `stop`, with the range in each shard."""
        index = int(np.searchsorted(self._stops, start, side="right"))
        while start < stop:
            shard = self._shards[index]
            shard_start = int(self._stops[index]) - len(shard.tokens)
            piece_stop = min(stop, int(self._stops[index]))
            yield shard, start - shard_start, piece_stop - shard_start
            start, index = piece_stop, index + 1


def _begins(ends: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return a mask of the tokens from `start` to `stop` of a shard that begin a document."""
    first = np.zeros(stop - start, bool)
    low, high = np.searchsorted(ends, [start, stop], side="left")
    inside = np.asarray(ends[low:high]) - start
    first[inside[inside < stop - start]] = True
    if start == 0:
        first[0] = True
    return first
