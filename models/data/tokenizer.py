"""Tokenizers: plain bytes, or a loaded or trained tokenizer of Hugging Face's `tokenizers`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models.data.documents import Document
from models.data.extras import optional_module
from models.data.files import readable
from models.errors import InputError

END = "<|endoftext|>"
# Common names of the end-of-document token, tried if no `tokenizer_config.json` names it.
_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_PIECE = 2**20  # characters of a document that are encoded at once
_LARGEST_VOCAB = 2**24


class Bytes:
    """A tokenizer whose tokens are bytes. It has no end-of-document token."""

    name = "bytes"
    vocab = 256
    end: int | None = None
    fingerprint = "bytes"
    token_bytes: np.ndarray | None = np.ones(256, np.float64)

    def encode(self, documents: Sequence[Document]) -> list[np.ndarray]:
        """Encode documents, each as an array of integers."""
        return [np.frombuffer(document.content, np.uint8) for document in documents]

    def prompt(self, text: str) -> np.ndarray:
        """Encode a prompt."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Decode tokens. Tokens above 255, which a larger vocabulary has, are skipped."""
        return bytes(token for token in tokens if token < 256)

    def to_json(self) -> str | None:
        """Return None: bytes need no `tokenizer.json`."""
        return None


@dataclasses.dataclass(frozen=True)
class SubwordTokenizer:
    """A tokenizer of the package `tokenizers`.

    Attributes:
      name: its path, or its name such as "bpe:8192".
      inner: the `tokenizers.Tokenizer`.
      end: the token that ends a document; None without one.
    """

    name: str
    inner: Any
    end: int | None

    @functools.cached_property
    def vocab(self) -> int:
        """Size of the vocabulary: the largest token plus one."""
        return max(self.inner.get_vocab().values()) + 1

    @property
    def fingerprint(self) -> str:
        """A hash that identifies the tokenizer."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text for each token, float64 `[vocab]`; None if they are not known.

        They are known for byte-level BPE, where each letter of a token stands for one byte.
        """
        model = json.loads(self.to_json())
        steps = [model.get("decoder") or {}]
        if steps[0].get("type") != "ByteLevel" or model["model"]["type"] != "BPE":
            return None
        added = {token.content: token for token in self.inner.get_added_tokens_decoder().values()}
        sizes = np.zeros(self.vocab)
        for word, token in self.inner.get_vocab().items():
            special = word in added and added[word].special
            sizes[token] = 0 if special else len(word.encode() if word in added else word)
        return sizes

    def encode(self, documents: Sequence[Document]) -> list[np.ndarray]:
        """Encode documents, each as an array of integers, with the end token if there is one.

        Text that looks like a special token is encoded as ordinary text. A long document is encoded
        in pieces that begin at a line.

        Raises:
          InputError: a document is not UTF-8.
        """
        pieces = [list(_pieces(document)) for document in documents]
        flat = self.inner.encode_batch_fast([p for ps in pieces for p in ps],
                                            add_special_tokens=False)  # fmt: skip
        encoded = iter(flat)
        ends = [] if self.end is None else [self.end]
        return [
            np.array([t for _ in ps for t in next(encoded).ids] + ends, np.uint32) for ps in pieces
        ]

    def prompt(self, text: str) -> np.ndarray:
        """Encode a prompt, without an end token."""
        return np.array(self.inner.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Decode tokens to UTF-8. Special tokens are dropped; invalid UTF-8 becomes U+FFFD."""
        known = [token for token in map(int, tokens) if token < self.vocab]
        return self.inner.decode(known, skip_special_tokens=True).encode()

    def to_json(self) -> str:
        """Return the content of `tokenizer.json`."""
        return self.inner.to_str()


Tokenizer = Bytes | SubwordTokenizer


def _pieces(document: Document) -> Iterator[str]:
    """Cut a document into pieces of at most `_PIECE` characters, at line ends if possible."""
    text, start = _decoded(document), 0
    while len(text) - start > _PIECE:
        # No token crosses a newline that has no white space on either side.
        cut = max((m.start() for m in _LINE.finditer(text, start, start + _PIECE)), default=0)
        stop = cut or start + _PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


_LINE = re.compile(r"(?<=\S\n)(?=\S)")


def _decoded(document: Document) -> str:
    """Return the text of a document; `InputError` if it is not UTF-8."""
    try:
        return document.content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{document.where} is not UTF-8 (byte {error.start}): convert it, or train on bytes"
        ) from None


def train_bpe(vocab: int, documents: Iterable[Document]) -> SubwordTokenizer:
    """Train a byte-level byte-pair encoding like GPT-2's, with at most `vocab` tokens.

    Token 0 ends a document. Every UTF-8 text can be encoded.

    Raises:
      InputError: `vocab` is below 257 or too large, a document is not UTF-8, or the package
        `tokenizers` is missing.
    """
    if not 257 <= vocab <= _LARGEST_VOCAB:
        raise InputError(f"bpe:{vocab}: the vocabulary must have 257 (all bytes and an end token)"
                         f" to {_LARGEST_VOCAB} tokens")  # fmt: skip
    library = optional_module("tokenizers", f"bpe:{vocab}")
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((piece for one in documents for piece in _pieces(one)), trainer)
    return _with_end_token(f"bpe:{vocab}", inner, END)


def load_tokenizer(path: Path) -> SubwordTokenizer:
    """Load a `tokenizer.json`, or the one in a folder.

    The end-of-document token is the `eos_token` of a `tokenizer_config.json` beside it, or a token
    with a common name such as `</s>`.

    Raises:
      InputError: a file cannot be read, or is not a tokenizer.
    """
    library = optional_module("tokenizers", f"the tokenizer {path}")
    with readable():
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file() and file.exists():
            raise InputError(f"{file} is not a file: name a tokenizer.json")
        content = file.read_bytes()
        config = file.with_name("tokenizer_config.json")
        config_bytes = config.read_bytes() if config.is_file() else b"{}"
    return parse_tokenizer(content, str(file), _end_in_config(config_bytes, str(config)), library)


def parse_tokenizer(
    content: bytes, where: str, end: str | None = None, library: Any = None
) -> SubwordTokenizer:
    """Make a tokenizer from the bytes of a `tokenizer.json`.

    Args:
      content: the bytes.
      where: the name of the file in error messages.
      end: the end-of-document token; None to look for common names.
      library: the module `tokenizers`, if it is already imported.
    """
    library = library or optional_module("tokenizers", f"the tokenizer {where}")
    try:
        inner = library.Tokenizer.from_str(content.decode())
    # The package raises plain Exceptions.
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
        raise InputError(f"{where} is not a tokenizer of the package `tokenizers`: {reason}"
                         ) from None  # fmt: skip
    if not inner.get_vocab_size():
        raise InputError(f"{where} is a tokenizer with an empty vocabulary: choose another")
    inner.no_truncation()
    inner.no_padding()
    return _with_end_token(where, inner, end)


def _end_in_config(content: bytes, where: str) -> str | None:
    """Return the `eos_token` of a `tokenizer_config.json`; None if it has none."""
    try:
        end = json.loads(content).get("eos_token")
    except (ValueError, AttributeError):
        raise InputError(f"{where} is not a JSON object") from None
    end = end.get("content") if isinstance(end, dict) else end
    if end is not None and not isinstance(end, str):
        raise InputError(f"eos_token in {where} is {end!r}, but must be a string")
    return end


def _with_end_token(name: str, inner: Any, end: str | None) -> SubwordTokenizer:
    """Make the tokenizer; its end token is `end`, or else a token with a common name."""
    inner.encode_special_tokens = True
    ends = [t for word in (end, *_ENDS) if word and (t := inner.token_to_id(word)) is not None]
    return SubwordTokenizer(name, inner, ends[0] if ends else None)


def tokenizer_of(option: str, documents: Iterable[Document]) -> Tokenizer:
    """Load or train the tokenizer of a `--tokenizer` option.

    Args:
      option: "bytes", "bpe:8192" (trained on the documents), or the path of a `tokenizer.json` or
        of its folder.
      documents: the documents to train on, read only for "bpe:...".

    Raises:
      InputError: `option` is not valid, or the tokenizer cannot be loaded or trained.
    """
    if option == "bytes":
        return Bytes()
    if size := _bpe_size(option):
        return train_bpe(size, documents)
    return _load(option)


def vocabulary(option: str) -> int | None:
    """Return the vocabulary size of a `--tokenizer` option; None for bytes.

    For "bpe:8192" it is the requested size, because nothing is trained.

    Raises:
      InputError: `option` is not valid, or the tokenizer cannot be loaded.
    """
    if option == "bytes":
        return None
    return _bpe_size(option) or _load(option).vocab


def _bpe_size(option: str) -> int | None:
    """Return 8192 for "bpe:8192", and None for another kind of tokenizer."""
    if not option.startswith("bpe:"):
        return None
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", size := option[4:]):
        raise InputError(f"{option!r} has no valid vocabulary size: use for example bpe:8192")
    return int(size)


def _load(option: str) -> SubwordTokenizer:
    """Load the tokenizer at a path."""
    with readable():
        exists = option and Path(option).exists()
    if not exists:
        raise InputError(
            f"{option!r} is not a tokenizer: use bytes, bpe:8192, or the path of a tokenizer.json"
        )
    return load_tokenizer(Path(option))
