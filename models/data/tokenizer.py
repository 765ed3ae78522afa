"""Tokens of text: its bytes, or the words of a Hugging Face tokenizer, loaded or trained."""

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
from models.data.extras import needed
from models.data.files import readable
from models.errors import InputError

END = "<|endoftext|>"
# Names that published tokenizers give to the end of a document, where nothing beside them says it.
_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_PIECE = 2**20  # characters that are encoded at once
_LARGEST_VOCAB = 2**24


class Bytes:
    """Each byte is a token, and nothing ends a document: the next one begins."""

    name = "bytes"
    vocab = 256
    end: int | None = None
    fingerprint = "bytes"
    token_bytes: np.ndarray | None = np.ones(256, np.float64)

    def encode(self, some: Sequence[Document]) -> list[np.ndarray]:
        """The tokens of documents, each an array of integers."""
        return [np.frombuffer(document.content, np.uint8) for document in some]

    def prompt(self, text: str) -> np.ndarray:
        """The tokens of a text that is to be continued."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens; a vocabulary may be larger than the bytes that there are."""
        return bytes(token for token in tokens if token < 256)

    def to_json(self) -> str | None:
        """What `tokenizer.json` holds: there is none."""
        return None


@dataclasses.dataclass(frozen=True)
class Words:
    """A tokenizer of the package `tokenizers`.

    Attributes:
      name: where it is from.
      inner: the tokenizer.
      end: the token that ends a document, if it has one.
    """

    name: str
    inner: Any
    end: int | None

    @functools.cached_property
    def vocab(self) -> int:
        """How many tokens there are: the largest, and one."""
        return max(self.inner.get_vocab().values()) + 1

    @property
    def fingerprint(self) -> str:
        """What tells one tokenizer from another."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text that each token stands for, float64 `[vocab]`; None if it is not known.

        It is for tokenizers of bytes, in which a letter of a token stands for a byte.
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

    def encode(self, some: Sequence[Document]) -> list[np.ndarray]:
        """The tokens of documents, each an array of integers, with the end where there is one.

        What reads like a special token is text as any other. A long document is encoded piece by
        piece, cut where a line begins.

        Raises:
          InputError: a document is not UTF-8.
        """
        pieces = [list(_pieces(document)) for document in some]
        flat = self.inner.encode_batch_fast([p for ps in pieces for p in ps],
                                            add_special_tokens=False)  # fmt: skip
        encoded = iter(flat)
        ends = [] if self.end is None else [self.end]
        return [
            np.array([t for _ in ps for t in next(encoded).ids] + ends, np.uint32) for ps in pieces
        ]

    def prompt(self, text: str) -> np.ndarray:
        """The tokens of a text that is to be continued, without an end."""
        return np.array(self.inner.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens, without special ones; what is no UTF-8 becomes U+FFFD."""
        known = [token for token in map(int, tokens) if token < self.vocab]
        return self.inner.decode(known, skip_special_tokens=True).encode()

    def to_json(self) -> str:
        """What `tokenizer.json` holds."""
        return self.inner.to_str()


Tokenizer = Bytes | Words


def _pieces(document: Document) -> Iterator[str]:
    text, start = _decoded(document), 0
    while len(text) - start > _PIECE:
        # Where a line with no space before or after it begins, no token crosses.
        cut = max((m.start() for m in _LINE.finditer(text, start, start + _PIECE)), default=0)
        stop = cut or start + _PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


_LINE = re.compile(r"(?<=\S\n)(?=\S)")


def _decoded(document: Document) -> str:
    try:
        return document.content.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{document.where} is not UTF-8 (byte {error.start}): convert it, or train on bytes"
        ) from None


def train_bpe(vocab: int, some: Iterable[Document]) -> Words:
    """A byte-level byte-pair encoding in the form of GPT-2, of `vocab` tokens at most.

    Token 0 is the end of a document. Any bytes of UTF-8 can be written in its tokens.

    Raises:
      InputError: fewer tokens than there are bytes are wanted, or there is no text.
    """
    if not 257 <= vocab <= _LARGEST_VOCAB:
        raise InputError(f"bpe:{vocab}: a vocabulary has 257 (bytes and an end) to {_LARGEST_VOCAB}"
                         " tokens")  # fmt: skip
    library = needed("tokenizers", f"bpe:{vocab}")
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((piece for one in some for piece in _pieces(one)), trainer)
    return _words(f"bpe:{vocab}", inner, END)


def load_words(path: Path) -> Words:
    """The tokenizer of a `tokenizer.json`, or of a folder with one.

    The end of a document is what `tokenizer_config.json` beside it says, or goes by a usual name.

    Raises:
      InputError: it cannot be read.
    """
    library = needed("tokenizers", f"the tokenizer {path}")
    with readable():
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file() and file.exists():
            raise InputError(f"{file} is no file")
        content = file.read_bytes()
        beside = file.with_name("tokenizer_config.json")
        said = beside.read_bytes() if beside.is_file() else b"{}"
    return parse_words(content, str(file), _said_end(said, str(beside)), library)


def parse_words(content: bytes, where: str, end: str | None = None, library: Any = None) -> Words:
    """The tokenizer that the bytes of a `tokenizer.json` describe; `where` is its place."""
    library = library or needed("tokenizers", f"the tokenizer {where}")
    try:
        inner = library.Tokenizer.from_str(content.decode())
    # The package raises Exception itself.
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
        raise InputError(f"{where} is no tokenizer of the package `tokenizers`: {reason}") from None
    if not inner.get_vocab_size():
        raise InputError(f"{where} is a tokenizer without tokens")
    inner.no_truncation()
    inner.no_padding()
    return _words(where, inner, end)


def _said_end(content: bytes, where: str) -> str | None:
    try:
        end = json.loads(content).get("eos_token")
    except (ValueError, AttributeError):
        raise InputError(f"{where} is no JSON object") from None
    end = end.get("content") if isinstance(end, dict) else end
    if end is not None and not isinstance(end, str):
        raise InputError(f"eos_token in {where} is {end!r}, and no text")
    return end


def _words(name: str, inner: Any, end: str | None) -> Words:
    inner.encode_special_tokens = True
    found = [t for word in (end, *_ENDS) if word and (t := inner.token_to_id(word)) is not None]
    return Words(name, inner, found[0] if found else None)


def tokenizer_of(wanted: str, some: Iterable[Document]) -> Tokenizer:
    """The tokenizer that a text names.

    Args:
      wanted: "bytes"; "bpe:8192", to be trained on `some`; or the path of a `tokenizer.json`.
      some: documents to train on, read only where they are needed.

    Raises:
      InputError: it names none.
    """
    if wanted == "bytes":
        return Bytes()
    if size := _size(wanted):
        return train_bpe(size, some)
    return _loaded(wanted)


def vocabulary(wanted: str) -> int | None:
    """How many tokens the tokenizer that a text names has; None for bytes.

    One that is to be trained has as many as it is asked for.

    Raises:
      InputError: it names none.
    """
    if wanted == "bytes":
        return None
    return _size(wanted) or _loaded(wanted).vocab


def _size(wanted: str) -> int | None:
    """Of "bpe:8192", 8192; None of others."""
    if not wanted.startswith("bpe:"):
        return None
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", size := wanted[4:]):
        raise InputError(f"{wanted!r} names no size of a vocabulary: give bpe:8192, say")
    return int(size)


def _loaded(wanted: str) -> Words:
    with readable():
        there = wanted and Path(wanted).exists()
    if not there:
        raise InputError(f"{wanted!r} is no tokenizer: give bytes, bpe:8192, or a tokenizer.json")
    return load_words(Path(wanted))
