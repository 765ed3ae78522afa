"""Validation is a share of the documents that depends only on their content, and is never empty."""

import pytest

from models.data.documents import Document
from models.data.split import split


def parts(texts: list[str], fraction: float = 0.1) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "validation": []}
    for part, document in split((Document(t.encode(), t) for t in texts), fraction):
        found[part].append(document.content.decode())
    return found


def test_a_share_is_held_and_all_are_there() -> None:
    texts = [f"document {i}" for i in range(2000)]
    found = parts(texts)
    assert sorted(found["train"] + found["validation"]) == sorted(texts)
    assert 150 < len(found["validation"]) < 250


def test_split_of_a_document_does_not_depend_on_its_position() -> None:
    texts = [f"document {i}" for i in range(300)]
    held = set(parts(texts)["validation"])
    assert set(parts(texts[::-1] + texts)["validation"]) == held
    assert len(parts(texts + texts)["validation"]) == 2 * len(held)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_of_few_documents_one_is_held(count: int) -> None:
    texts = [f"document {i}" for i in range(count)]
    for some in (texts, texts[::-1]):
        found = parts(some, fraction=1e-9)
        assert len(found["validation"]) == 1
        assert sorted(found["train"] + found["validation"]) == texts
    assert parts(texts, 1e-9)["validation"] == parts(texts[::-1], 1e-9)["validation"]


def test_a_document_that_is_alone_is_cut_at_a_line() -> None:
    lines = "".join(f"line {i}\n" for i in range(100))
    found = parts([lines])
    assert found["train"][0] + found["validation"][0] == lines
    assert found["validation"][0].startswith("line ")
    assert 0.08 < len(found["validation"][0]) / len(lines) < 0.16
    assert parts(["é" * 99])["validation"] == ["é" * 10]


def test_of_nothing_there_is_nothing() -> None:
    assert parts([]) == {"train": [], "validation": []}
