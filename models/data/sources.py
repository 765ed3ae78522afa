"""The texts named by `--data`: their weights, and a prepared folder for each.

A prepared folder holds the tokens of a text, see `shards.py`. Any other text is first tokenized
into a new prepared folder.
"""

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
from models.data.tokenizer import Bytes, Tokenizer, parse_tokenizer, tokenizer_of
from models.errors import InputError


def weighted(given: str) -> tuple[Path, float]:
    """Split `path=weight` into a path and a weight, which is 1 by default.

    Raises:
      InputError: the path is empty, or the weight is not a positive number.
    """
    name, sign, number = given.rpartition("=")
    with readable():
        name, number = (name, number) if sign and not Path(given).exists() else (given, "1")
    try:
        weight = float(number)
    except ValueError:  # a path with "=" in it
        name, weight = given, 1.0
    if not name or "\0" in name:
        raise InputError(f"--data is {given!r}, which is not a path")
    if not 0 < weight < math.inf:
        raise InputError(f"--data {given}: the weight must be a number above 0")
    return Path(name), weight


def vocabulary(data: Sequence[str], tokenizer: str | None) -> int | None:
    """Return the vocabulary size of texts, without reading them; None if they are read as bytes.

    Args:
      data: paths with weights. Prepared folders have their own tokenizer.
      tokenizer: "bytes", "bpe:8192", the path of a `tokenizer.json`, or None.

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
    """Open each text as a prepared folder. Texts are prepared first, if they were not before.

    All folders share one tokenizer. If it has to be trained, it is trained on all texts.

    Args:
      paths: prepared folders, or texts: a file, a folder, or None for the source files of Python's
        standard library. Texts are prepared in folders under `work`, unless these exist from an
        earlier call.
      tokenizer: "bytes", "bpe:8192" to train one, or the path of a `tokenizer.json`; None for the
        tokenizer of the prepared folders, or bytes.
      column: the column of tables, or the field of JSON lines, that holds the text.
      work: the parent of new folders. Each is named by a hash of the arguments.
      without: a folder whose files are skipped.

    Raises:
      InputError: a text or folder cannot be used, or `tokenizer` is given for a prepared folder.
    """
    if tokenizer is not None and any(map(is_prepared, paths)):
        raise InputError(
            f"--tokenizer {tokenizer}: a prepared folder has its own tokenizer: leave out"
            " --tokenizer, or name the text instead of the folder"
        )
    key = json.dumps([[str(p and p.resolve()) for p in paths], tokenizer, column])
    places = [
        path if path is not None and is_prepared(path) else work / _name(key, number)
        for number, path in enumerate(paths)
    ]
    opened = {place: open_prepared(place) for place in places if is_prepared(place)}
    missing = {place: p for place, p in zip(places, paths, strict=True) if place not in opened}
    if missing:
        shared = _tokenizer_of_first(list(opened.values()))
        if shared is None:
            training = (training_documents(p, column, without) for p in missing.values())
            shared = tokenizer_of(tokenizer or "bytes", itertools.chain.from_iterable(training))
        for place, path in missing.items():
            prepare(path, place, tokenizer=shared, column=column, without=without)
            opened[place] = open_prepared(place)
    return [opened[place] for place in places]


def _name(key: str, number: int) -> str:
    """Return the name of a new prepared folder."""
    return hashlib.sha256(f"{number} {key}".encode()).hexdigest()[:16]


def _tokenizer_of_first(opened: Sequence[Prepared]) -> Tokenizer | None:
    """Return the tokenizer of the first prepared folder; None if there are no folders."""
    if not opened:
        return None
    content = opened[0].tokenizer_json
    return Bytes() if content is None else parse_tokenizer(content, opened[0].name)
