"""Texts that a user names: their weights, and a prepared folder for each."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

from models.data import shards
from models.data import tokenizer as tokenizers
from models.data.files import readable
from models.data.prepare import prepare, training_documents
from models.data.shards import Prepared, is_prepared, open_prepared
from models.data.tokenizer import Bytes, Tokenizer, parse_words, tokenizer_of
from models.errors import InputError


def weighted(given: str) -> tuple[Path, float]:
    """A path, and the number after `=` behind it, or 1.

    Raises:
      InputError: it names nothing, or no share.
    """
    name, sign, number = given.rpartition("=")
    with readable():
        name, number = (name, number) if sign and not Path(given).exists() else (given, "1")
    try:
        weight = float(number)
    except ValueError:  # a name with a sign in it
        name, weight = given, 1.0
    if not name or "\0" in name:
        raise InputError(f"--data is {given!r}, which names no file or folder")
    if not 0 < weight < math.inf:
        raise InputError(f"--data {given}: a weight is a number above 0")
    return Path(name), weight


def vocabulary(data: Sequence[str], tokenizer: str | None) -> int | None:
    """How many tokens texts are in, which are not read; None where they are bytes.

    Args:
      data: paths with weights, of which prepared folders have a tokenizer of their own.
      tokenizer: as for `tokenizer_of`.

    Raises:
      InputError: there is no such tokenizer, or a folder is damaged.
    """
    if tokenizer is not None:
        return tokenizers.vocabulary(tokenizer)
    folders = [path for path, _ in map(weighted, data) if is_prepared(path)]
    return max((n for n in map(shards.vocabulary, folders) if n), default=None)


def prepared(
    paths: Sequence[Path | None],
    tokenizer: str | None,
    column: str,
    work: Path,
    without: Path | None,
) -> list[Prepared]:
    """Each text as a prepared folder, open. All have one tokenizer, trained on all if it is.

    Args:
      paths: prepared folders, or texts as for `documents`, which are prepared in folders of `work`
        unless they are there from before.
      tokenizer: as for `tokenizer_of`; None for that of a prepared folder, or bytes.
      column: as for `documents`.
      work: where folders are made; each is named for what it is made of.
      without: as for `documents`.

    Raises:
      InputError: a text or folder cannot be used, or has a tokenizer of its own.
    """
    if tokenizer is not None and any(map(is_prepared, paths)):
        raise InputError(
            f"--tokenizer {tokenizer}: a prepared folder has its own; leave it out, or give text"
        )
    said = json.dumps([[str(p and p.resolve()) for p in paths], tokenizer, column])
    places = [
        path if path is not None and is_prepared(path) else work / _name(said, number)
        for number, path in enumerate(paths)
    ]
    opened = {place: open_prepared(place) for place in places if is_prepared(place)}
    missing = {place: p for place, p in zip(places, paths, strict=True) if place not in opened}
    if missing:
        words = _shared(list(opened.values()))
        if words is None:
            some = (training_documents(p, column, without) for p in missing.values())
            words = tokenizer_of(tokenizer or "bytes", itertools.chain.from_iterable(some))
        for place, path in missing.items():
            prepare(path, place, tokenizer=words, column=column, without=without)
            opened[place] = open_prepared(place)
    return [opened[place] for place in places]


def _name(said: str, number: int) -> str:
    return hashlib.sha256(f"{number} {said}".encode()).hexdigest()[:16]


def _shared(opened: Sequence[Prepared]) -> Tokenizer | None:
    """The tokenizer of prepared folders, if there are any."""
    if not opened:
        return None
    words = opened[0].words
    return Bytes() if words is None else parse_words(words, opened[0].name)
