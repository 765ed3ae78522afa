"""Split documents for training and validation by a hash of their content.

Copies of a document are therefore in the same part.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator

from models.data.documents import Document

# A part, "train" or "validation", and a document of it.
Split = tuple[str, Document]


def split(all_documents: Iterable[Document], fraction: float) -> Iterator[Split]:
    """Iterate over pairs of a part, "train" or "validation", and a document.

    Validation gets the documents whose hash is in the lowest `fraction` of the range of hashes. If
    there are none, it gets the document with the lowest hash. A single document is cut in two, at
    the end of a line if possible.
    """
    documents = iter(all_documents)
    first = list(itertools.islice(documents, 2))
    if len(first) == 1:
        yield from _halves(first[0], fraction)
        return
    lowest: tuple[float, Document] | None = None
    has_validation = False
    for document in itertools.chain(first, documents):
        rank = _rank(document)
        if rank < fraction:
            has_validation = True
            yield "validation", document
        # Until a document falls below `fraction`, hold back the one with the lowest hash.
        elif has_validation or (lowest is not None and lowest[0] <= rank):
            yield "train", document
        else:
            if lowest is not None:
                yield "train", lowest[1]
            lowest = rank, document
    if lowest is not None:
        yield "train" if has_validation else "validation", lowest[1]


def _rank(document: Document) -> float:
    """Hash the content to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(document.content).digest()[:8], "big") / 2**64


def _halves(document: Document, fraction: float) -> Iterator[Split]:
    """Cut a document in two: its last `fraction` is for validation."""
    content = document.content
    cut = len(content) - int(len(content) * fraction)
    line = content.rfind(b"\n", cut - int(len(content) * fraction) // 2, cut) + 1
    cut = line or cut
    while not line and 0 < cut < len(content) and content[cut] & 0xC0 == 0x80:
        cut -= 1  # do not cut within a UTF-8 character
    for part, piece in (("train", content[:cut]), ("validation", content[cut:])):
        if piece:
            yield part, Document(piece, document.where)
